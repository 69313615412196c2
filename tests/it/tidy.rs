//! The house's plan, read from the source: which room may know of which.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Each room, from the ground up. A room may use those before it, and itself.
const ROOMS: [&str; 5] = ["claim", "key", "store", "dedupe", "http"];

/// Every source file with its path in `src`.
fn sources() -> Vec<(String, String)> {
    fn collect(directory: &Path, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, into);
            } else {
                into.push(path);
            }
        }
    }
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    collect(&src, &mut paths);
    assert!(paths.len() > 20);
    paths
        .iter()
        .map(|path| {
            let name = path.strip_prefix(&src).unwrap().to_string_lossy().replace('\\', "/");
            (name, fs::read_to_string(path).unwrap())
        })
        .collect()
}

/// The code of a file: no comments, and nothing from its unit tests on.
fn code(source: &str) -> impl Iterator<Item = &str> {
    let tests = source.find("#[cfg(test)]").unwrap_or(source.len());
    let lines = source[..tests].lines().map(str::trim);
    lines.filter(|line| !line.starts_with("//"))
}

fn room(file: &str) -> &str {
    file.split(['/', '.']).next().unwrap()
}

/// The rooms named in `use crate::…` and `crate::…`, groups over several lines too.
fn rooms_used(source: &str) -> Vec<String> {
    let code: String = code(source).collect::<Vec<_>>().join(" ");
    let mut used = Vec::new();
    for (_, after) in
        code.match_indices("crate::").map(|(at, found)| code.split_at(at + found.len()))
    {
        if let Some(group) = after.strip_prefix('{') {
            let mut depth = 0;
            let mut name = String::new();
            for c in group.chars() {
                match c {
                    '{' => depth += 1,
                    '}' if depth == 0 => break,
                    '}' => depth -= 1,
                    ',' if depth == 0 => used.push(std::mem::take(&mut name)),
                    _ if depth == 0 => name.push(c),
                    _ => {}
                }
            }
            used.push(name);
        } else {
            used.push(after.to_owned());
        }
    }
    let first = |name: &String| {
        let name = name.trim();
        let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
        name[..end].to_owned()
    };
    used.iter().map(first).filter(|name| !name.is_empty()).collect()
}

#[test]
fn the_arrows_point_one_way() {
    assert_eq!(rooms_used("use crate::{a::{b, c}, d, e};\nuse crate::f::g;"), ["a", "d", "e", "f"]);
    for (file, source) in sources() {
        let Some(height) = ROOMS.iter().position(|name| *name == room(&file)) else { continue };
        for used in rooms_used(&source) {
            let Some(other) = ROOMS.iter().position(|name| *name == used) else { continue };
            assert!(
                other <= height,
                "src/{file} uses crate::{used}, but the arrows point one way: http → dedupe → \
                 store, key → claim; what is needed below belongs below",
            );
        }
    }
    let store_and_key = sources().into_iter().filter(|(file, _)| room(file) == "store");
    for (file, source) in store_and_key {
        assert!(
            !rooms_used(&source).contains(&"key".to_owned()),
            "src/{file}: a store knows claims, not where keys come from"
        );
    }
}

#[test]
fn only_the_store_in_postgres_speaks_sql() {
    let words = ["tokio_postgres", "deadpool", "INSERT INTO", "UPDATE ", "DELETE FROM", "SELECT "];
    for (file, source) in sources() {
        if file.starts_with("store/postgres/") {
            continue;
        }
        for line in code(&source) {
            assert!(
                !words.iter().any(|word| line.contains(word)),
                "src/{file} has {line:?}: SQL and Postgres types stand in src/store/postgres, so \
                 that the protocol can be read without a database",
            );
        }
    }
}

#[test]
fn all_statements_of_requests_stand_in_one_file() {
    let words = ["INSERT INTO", "UPDATE ", "DELETE FROM", "SELECT "];
    for (file, source) in sources() {
        if ["store/postgres/statements.rs", "store/postgres/schema.rs"].contains(&&*file) {
            continue;
        }
        for line in code(&source) {
            assert!(
                !words.iter().any(|word| line.contains(word)),
                "src/{file} has {line:?}: statements stand in statements.rs with their purpose, \
                 locks and index, migrations in schema.rs",
            );
        }
    }
}

#[test]
fn only_the_layer_knows_tower_and_http() {
    for (file, source) in sources() {
        if room(&file) == "http" {
            continue;
        }
        for line in code(&source) {
            let tower = ["tower_layer", "tower_service", "http_body", "axum", "hyper"];
            assert!(
                !tower.iter().any(|word| line.contains(&format!("{word}::"))),
                "src/{file} has {line:?}: Tower and HTTP stand in src/http, so that queue consumers \
                 can use the rest",
            );
            assert!(
                room(&file) == "key" || !line.contains("use http::"),
                "src/{file} has {line:?}: heads of requests are known to src/http and src/key only",
            );
        }
    }
}
