//! The rooms of the crate and what may pass between them, read off the source. A rule that is broken
//! is named with the reason for it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Who may use whom: a room uses rooms that stand lower, and itself.
const ROOMS: &[&[&str]] = &[
    &["main", "cli"],
    &["lib", "testing"],
    &["provider"],
    &["http"],
    &["transaction"],
    &["dedupe"],
    &["store", "key"],
    &["claim"],
];

/// What only some rooms may name, and why.
const RESERVED: &[Reserved] = &[
    Reserved {
        names: &["tokio_postgres", "deadpool_postgres", "tokio_postgres_rustls", "rustls"],
        rooms: &["store/postgres/", "transaction/"],
        why: "the protocol runs on any store: only the Postgres store and its transactions know of Postgres",
    },
    Reserved {
        names: &[
            "tower",
            "tower_layer",
            "tower_service",
            "hyper",
            "http_body",
            "http_body_util",
            "axum",
        ],
        rooms: &["http/"],
        why: "the protocol serves queues as well as requests: only the layer knows of Tower and bodies",
    },
    Reserved {
        names: &["http"],
        rooms: &["http/", "key/"],
        why: "the protocol serves queues as well as requests: only the layer and its keys know of HTTP",
    },
    Reserved {
        names: &["tokio"],
        rooms: &["cli/", "dedupe/", "http/", "main.rs", "store/", "testing/", "transaction/"],
        why: "the words of the protocol and the reading of keys do no I/O and wait for nothing",
    },
];

struct Reserved {
    names: &'static [&'static str],
    rooms: &'static [&'static str],
    why: &'static str,
}

/// Where SQL is. The conformance suite has keys that look like it.
const SPEAKS_SQL: &[&str] =
    &["store/postgres/statements.rs", "store/postgres/schema.rs", "testing/conformance.rs"];

/// What only SQL has in it.
const SQL: &[&str] = &[
    "SELECT ",
    "INSERT INTO",
    "UPDATE ",
    "DELETE FROM",
    "ON CONFLICT",
    "CREATE TABLE",
    "ALTER TABLE",
    "DROP TABLE",
    "TRUNCATE ",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SET LOCAL",
];

#[test]
fn the_rooms_keep_their_arrows() {
    let mut faults = Vec::new();
    let mut seen = 0;
    for path in sources(Path::new(SRC)) {
        let name = path.strip_prefix(SRC).unwrap().to_str().unwrap().replace('\\', "/");
        faults.extend(faults_of(&name, &fs::read_to_string(&path).unwrap()));
        seen += 1;
    }
    assert!(seen > 20, "only {seen} files were read");
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

#[test]
fn a_broken_rule_is_named() {
    let broken = [
        ("claim.rs", "use crate::store::MemoryStore;", "claim must not use store"),
        (
            "store/mod.rs",
            "use crate::{claim::{Claim, Held}, http::{Dedupe}};",
            "store must not use http",
        ),
        ("store/mod.rs", "use crate::key::KeySource;", "store must not use key"),
        ("store/postgres/session.rs", "const S: &str = \"ROLLBACK\";", "is SQL"),
        ("dedupe/mod.rs", "fn f() { crate::http::f() }", "dedupe must not use http"),
        (
            "dedupe/mod.rs",
            "use crate::{\n    transaction::Lent,\n};",
            "dedupe must not use transaction",
        ),
        ("http/mod.rs", "use crate::EventKey;", "crate::EventKey hides its room"),
        ("attic/mod.rs", "", "attic is no room"),
        ("dedupe/guard.rs", "use tokio_postgres::Client;", "tokio_postgres belongs to"),
        ("store/memory.rs", "let table = r#\"CREATE TABLE \"t\"\"#;", "\"CREATE TABLE\" is SQL"),
        ("store/memory.rs", "use {http::HeaderMap};", "http belongs to"),
        ("dedupe/mod.rs", "use http_body::Body;", "http_body belongs to"),
        ("claim.rs", "let t = tokio::time::Instant::now();", "tokio belongs to"),
    ];
    for (name, source, fault) in broken {
        let faults = faults_of(name, source);
        assert_eq!(faults.len(), 1, "{source}: {faults:?}");
        assert!(faults[0].contains(fault), "{source}: {faults:?}");
    }
    let whole = [
        ("claim.rs", "//! Never `use crate::store`, nor tokio::spawn.\n/* http::Uri */ fn f() {}"),
        ("dedupe/mod.rs", "use crate::{claim::Claim, key::KeySource, store::{self, StoreError}};"),
        (
            "http/mod.rs",
            "mod service; use crate::dedupe::f; use http::Uri; pub use self::service::S;",
        ),
        ("lib.rs", "pub mod http; pub use crate::{http::{DedupeLayer}, store::PgStore};"),
        (
            "store/postgres/statements.rs",
            "const S: &str = \"SELECT 1 // one\"; use crate::claim::A;",
        ),
        (
            "key/head.rs",
            "let quote = '\"'; use http::HeaderMap; let lifetime: &'static str = \"\\\"\";",
        ),
    ];
    for (name, source) in whole {
        assert_eq!(faults_of(name, source), Vec::<String>::new(), "{source}");
    }
}

/// What is wrong in a file of `src`.
fn faults_of(name: &str, source: &str) -> Vec<String> {
    let (code, texts) = split(source);
    let room = name.split('/').next().unwrap().trim_end_matches(".rs");
    let Some(level) = level_of(room) else {
        return vec![format!(
            "src/{name}: {room} is no room of the design: say where it stands in ROOMS"
        )];
    };
    let mut faults = Vec::new();

    for used in used_of_crate(&code) {
        if used.starts_with(char::is_uppercase) {
            if level > 1 {
                faults.push(format!(
                    "src/{name}: crate::{used} hides its room: name the module, so that the arrow shows"
                ));
            }
        } else if let Some(lower) = level_of(&used) {
            if used != room && lower <= level {
                faults.push(format!(
                    "src/{name}: {room} must not use {used}: arrows point from {} only",
                    ROOMS.iter().map(|rooms| rooms.join(", ")).collect::<Vec<_>>().join(" → "),
                ));
            }
        }
    }
    for reserved in RESERVED {
        if reserved.rooms.iter().any(|room| name.starts_with(room)) {
            continue;
        }
        for foreign in reserved.names.iter().filter(|foreign| names_crate(&code, foreign)) {
            faults.push(format!(
                "src/{name}: {foreign} belongs to src/{}: {}",
                reserved.rooms.join(", src/"),
                reserved.why,
            ));
        }
    }
    if !SPEAKS_SQL.iter().any(|file| name.starts_with(file)) {
        for sql in SQL.iter().filter(|sql| texts.contains(**sql)) {
            faults.push(format!(
                "src/{name}: {sql:?} is SQL: it stands in src/store/postgres, statements.rs with its \
                 purpose, locks and index, or schema.rs for migrations"
            ));
        }
    }
    faults
}

fn level_of(room: &str) -> Option<usize> {
    ROOMS.iter().position(|rooms| rooms.contains(&room))
}

/// The first names of all paths that begin with `crate::`, those in braces too.
fn used_of_crate(code: &str) -> Vec<String> {
    let mut used = Vec::new();
    for (at, crate_) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + crate_.len()..];
        match rest.trim_start().strip_prefix('{') {
            None => used.push(first_name(rest)),
            Some(group) => {
                let mut depth = 0;
                let mut begins = true;
                for (at, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => begins = true,
                        c if begins && !c.is_whitespace() => {
                            used.push(first_name(&group[at..]));
                            begins = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    used
}

fn first_name(path: &str) -> String {
    path.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// Whether a path begins with the name of this crate, as against `self::http::` or `crate::http::`.
fn names_crate(code: &str, name: &str) -> bool {
    let path = format!("{name}::");
    code.match_indices(&path).any(|(at, _)| {
        !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
            // In a group of the crate's own, such as `use crate::{http::…}`.
            && !in_group_of_crate(&code[..at])
    })
}

fn in_group_of_crate(before: &str) -> bool {
    let statement = before.rsplit(';').next().unwrap_or_default();
    ["crate::{", "self::{", "super::{"].iter().any(|group| statement.contains(group))
}

/// The code without comments and without what stands in its string literals; and what stands there.
fn split(source: &str) -> (String, String) {
    let (mut code, mut texts) = (String::new(), String::new());
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if rest.starts_with("/*") {
            rest = rest.find("*/").map_or("", |end| &rest[end + 2..]);
        } else if let Some((hashes, text)) = raw_string(rest) {
            let close = format!("\"{}", "#".repeat(hashes));
            let end = text.find(&close).expect("a raw string ends");
            texts.push_str(&text[..end]);
            texts.push('\n');
            rest = &text[end + close.len()..];
        } else if c == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            let end = end.expect("a string ends") + 1;
            texts.push_str(&rest[1..end]);
            texts.push('\n');
            rest = &rest[end + 1..];
        } else if let Some(after) =
            ["'\"'", "'\\\"'", "'\\''"].iter().find_map(|q| rest.strip_prefix(q))
        {
            rest = after;
        } else {
            code.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    (code, texts)
}

/// The number of hashes that open a raw string here, and what comes after its opening quote.
fn raw_string(rest: &str) -> Option<(usize, &str)> {
    let after = rest.strip_prefix('r')?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    Some((hashes, after[hashes..].strip_prefix('"')?))
}

/// All Rust files under a directory.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

const SRC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
