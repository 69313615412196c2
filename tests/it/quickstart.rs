//! The two tests of the field, on a real process: the same event twice, and a process killed
//! between claim and work. And what becomes of the throwaway server.

use std::{process::Stdio, time::Duration};

use http::StatusCode;
use serde_json::{Value, json};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tower_dedupe::{ClaimStore, EventKey, PgStore, Scope};

use crate::support::{
    http::{Answer, get, post, try_post},
    postgres,
    process::{self, Example, LEASE, OnDatabase},
};

async fn fulfilments(of: &Example, key: &str) -> Vec<(String, u64)> {
    let list: Value = serde_json::from_slice(&get(of.address, "/fulfilments").await.body).unwrap();
    let rows = list.as_array().unwrap().iter().filter(|row| row["event_key"] == key);
    rows.map(|row| {
        assert!(row["at"].is_string());
        (row["scope"].as_str().unwrap().to_owned(), row["attempt"].as_u64().unwrap())
    })
    .collect()
}

async fn stripe(to: &Example, id: &str) -> Answer {
    post(to.address, "/stripe", &[], json!({"id": id}).to_string()).await
}

/// Delivers until the answer is a success; every other one tells the sender to come back.
async fn until_success(to: &Example, id: &str) -> Answer {
    let started = Instant::now();
    loop {
        let answer = stripe(to, id).await;
        if answer.status.is_success() {
            return answer;
        }
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(answer.header("dedupe-status"), Some("in-progress"));
        assert!(answer.header("retry-after").is_some());
        assert!(started.elapsed() < 5 * LEASE, "the key is stuck");
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_event_twice_has_one_effect() {
    let quickstart = OnDatabase::of("quickstart").await;
    let example = quickstart.start().await;
    type Headers<'a> = &'a [(&'a str, &'a str)];
    let routes: [(&str, Headers<'_>, &str, &str); 3] = [
        ("/stripe", &[], r#"{"id": "evt_1"}"#, "evt_1"),
        ("/github", &[("x-github-delivery", "72d3162e")], "{}", "72d3162e"),
        ("/events", &[("ce-source", "/shop"), ("ce-id", "1")], "{}", "/shop+1"),
    ];
    for (path, headers, body, key) in routes {
        for status in [None, Some("duplicate"), Some("duplicate")] {
            let answer = post(example.address, path, headers, body).await;
            assert_eq!(answer.status, StatusCode::OK);
            assert_eq!(answer.header("dedupe-status"), status, "{path}");
        }
        assert_eq!(fulfilments(&example, key).await, [(path[1..].to_owned(), 1)]);
    }
    // Another process on the same database knows them too.
    let replica = quickstart.start().await;
    assert_eq!(stripe(&replica, "evt_1").await.header("dedupe-status"), Some("duplicate"));
    // Told to stop, it ends well.
    let pid = replica.pid().to_string();
    let told =
        std::process::Command::new("sh").args(["-c", "kill -TERM \"$1\"", "kill", &pid]).status();
    assert!(told.unwrap().success());
    assert_eq!(replica.ended().await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_dies_between_claim_and_work_does_not_lose_the_event() {
    let quickstart = OnDatabase::of("quickstart").await;
    for (id, how) in [("evt_crash", "crash"), ("evt_kill", "slow:60")] {
        let example = quickstart.start().await;
        let claimed = Instant::now();
        let address = example.address;
        let body = json!({"id": id}).to_string();
        let delivery =
            tokio::spawn(
                async move { try_post(address, "/stripe", &[("x-demo", how)], body).await },
            );
        if how == "crash" {
            assert!(delivery.await.unwrap().is_err(), "it answered before it crashed");
            assert_eq!(example.ended().await, None, "it did not crash");
        } else {
            // Killed while its handler works.
            let store = PgStore::connect(&quickstart.url).await.unwrap();
            let key = EventKey::new(Scope::new("stripe").unwrap(), id).unwrap();
            while store.show(&key).await.unwrap().is_none() {
                assert!(claimed.elapsed() < Duration::from_secs(20), "it was not claimed");
            }
            example.kill().await;
            assert!(delivery.await.unwrap().is_err());
        }

        let restarted = quickstart.start().await;
        assert_eq!(fulfilments(&restarted, id).await, []);
        let died = Instant::now();
        let early = stripe(&restarted, id).await;
        // On a machine so slow that the lease is over by now, the key is free by now.
        if early.status == StatusCode::SERVICE_UNAVAILABLE {
            assert_eq!(early.header("dedupe-status"), Some("in-progress"));
            let retry_after: u64 = early.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=LEASE.as_secs()).contains(&retry_after));
        } else {
            assert!(claimed.elapsed() >= LEASE, "{early:?} while the lease lives");
        }
        until_success(&restarted, id).await;
        assert!(died.elapsed() < 2 * LEASE, "the key was stuck for longer than its lease");
        assert_eq!(fulfilments(&restarted, id).await, [("stripe".to_owned(), 2)]);
        let third = stripe(&restarted, id).await;
        assert_eq!(third.status, StatusCode::OK);
        assert_eq!(third.header("dedupe-status"), Some("duplicate"));
        assert_eq!(fulfilments(&restarted, id).await.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_ends_well() {
    let database = spawn_blocking(postgres::shared).await.unwrap().url();
    let demo = process::command("quickstart")
        .arg("--demo")
        .env("DATABASE_URL", database)
        .stderr(Stdio::piped())
        .output()
        .await
        .unwrap();
    let (shown, errors) =
        (String::from_utf8_lossy(&demo.stdout), String::from_utf8_lossy(&demo.stderr));
    assert!(demo.status.success(), "{shown}\n{errors}");
    assert!(shown.contains("the process dies between claim and work"), "{shown}");
    assert!(!shown.contains("NO"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_cannot_be_used_is_said_to_be_so() {
    for (name, value, told) in [
        ("PORT", "http", "PORT=\"http\" is no port"),
        ("LEASE", "soon", "LEASE=\"soon\" is no lease"),
        ("LEASE", "1ms", "100ms or more"),
    ] {
        let output = process::command("quickstart").env(name, value).output().await.unwrap();
        assert_eq!(output.status.code(), Some(2));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains(told), "{errors}");
    }
    let unreachable = process::command("quickstart")
        .env("DATABASE_URL", "postgres://u@127.0.0.1:1/db")
        .output()
        .await
        .unwrap();
    assert_eq!(unreachable.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&unreachable.stderr);
    assert!(errors.contains("could not connect to Postgres"), "{errors}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throwaway_server_ends_with_its_owner_whatever_way_that_ends() {
    // A directory for temporary files of this test's own, to see what is left in it.
    let directory = std::env::temp_dir().join(format!("quickstart-test-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    // The server runs as another user if this is root, and must get to its directory.
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&directory, open).unwrap();
    let temp = directory.to_string_lossy().into_owned();
    let left = || std::fs::read_dir(&directory).unwrap().count();
    let gone = async || {
        let waiting = Instant::now();
        while left() > 0 {
            assert!(waiting.elapsed() < Duration::from_secs(20), "the directory is still there");
            sleep(Duration::from_millis(50)).await;
        }
    };

    let killed = Example::start("quickstart", &[("TMPDIR", &temp), ("LEASE", "2s")]).await;
    assert_eq!(stripe(&killed, "1").await.status, StatusCode::OK);
    assert_eq!(left(), 1);
    killed.kill().await;
    gone().await;

    // A crash of the server in it is part of the show: it goes on, with the same database.
    let told = Example::start("quickstart", &[("TMPDIR", &temp), ("LEASE", "2s")]).await;
    let crash = try_post(told.address, "/stripe", &[("x-demo", "crash")], r#"{"id": "2"}"#).await;
    assert!(crash.is_err());
    let waiting = Instant::now();
    while try_post(told.address, "/github", &[], "{}").await.is_err() {
        assert!(waiting.elapsed() < Duration::from_secs(20), "it was not started again");
        sleep(Duration::from_millis(50)).await;
    }
    until_success(&told, "2").await;
    assert_eq!(fulfilments(&told, "2").await, [("stripe".to_owned(), 2)]);
    let pid = told.pid().to_string();
    let term =
        std::process::Command::new("sh").args(["-c", "kill -TERM \"$1\"", "kill", &pid]).status();
    assert!(term.unwrap().success());
    assert_eq!(told.ended().await, Some(0));
    gone().await;
    std::fs::remove_dir(&directory).unwrap();
}
