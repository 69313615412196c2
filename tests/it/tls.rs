//! TLS to the database: what each `sslmode` encrypts, and whom it trusts.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tokio_postgres::NoTls;
use tower_dedupe::{
    ClaimStore, Deduplicator, EventKey, PgStore, Scope, Transaction,
    store::{StoreError, StoreErrorKind},
};

use crate::support::{postgres, throwaway::Throwaway};

/// An authority that signs servers' certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new([]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A server's certificate and key.
    fn sign(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Its own certificate in a file.
    fn file(&self, directory: &Path, name: &str) -> PathBuf {
        let file = directory.join(name);
        std::fs::write(&file, self.0.pem()).unwrap();
        file
    }
}

/// Lets the server speak TLS with this certificate, or no TLS.
async fn speak_tls(server: &Throwaway, certificate: Option<(String, String)>) {
    let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.unwrap();
    let driver = tokio::spawn(connection);
    match &certificate {
        Some((certificate, key)) => {
            // By the server's own hand, since the files must be its user's.
            for (file, text) in [("server.crt", certificate), ("server.key", key)] {
                let path = server.data().join(file);
                let write = format!(
                    "COPY (SELECT regexp_split_to_table('{text}', E'\\n')) \
                     TO PROGRAM 'umask 077; rm -f {0}; cat > {0}'",
                    path.display(),
                );
                client.batch_execute(&write).await.unwrap();
            }
            client.batch_execute("ALTER SYSTEM SET ssl = on").await.unwrap();
        }
        None => client.batch_execute("ALTER SYSTEM SET ssl = off").await.unwrap(),
    }
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    // The main process takes the settings over in its own time; new sessions then have them.
    drop(client);
    driver.await.unwrap().unwrap();
    loop {
        let (client, connection) = tokio_postgres::connect(&server.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        let row = client.query_one("SHOW ssl", &[]).await.unwrap();
        if (row.get::<_, &str>(0) == "on") == certificate.is_some() {
            return;
        }
    }
}

/// Whether a store at this URL has an encrypted connection, or why it has none.
async fn is_encrypted(url: &str) -> Result<bool, StoreError> {
    let store = PgStore::connect(url).await?;
    store.migrate().await?;
    let key = EventKey::new(Scope::new("s").unwrap(), "1").unwrap();
    store.show(&key).await?;
    let sql = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let client = store.pool().get().await.unwrap();
    Ok(client.query_one(sql, &[]).await.unwrap().get(0))
}

/// Sees the server end the statement of a transaction whose work is dropped.
async fn is_called_off(url: &str) {
    let store = PgStore::connect(url).await.unwrap();
    let dedupe = Deduplicator::builder(store.clone()).detached(false).build().unwrap();
    let key = EventKey::new(Scope::new("s").unwrap(), "called off").unwrap();
    let running = tokio::spawn(async move {
        let sleep = async |_, transaction: Transaction| {
            transaction.execute("SELECT pg_sleep(600)", &[]).await.map(drop)
        };
        dedupe.run_in_transaction(key, sleep).await.map(drop)
    });
    let client = store.pool().get().await.unwrap();
    let asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
    let sleeps = async |expected: i64| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while client.query_one(asleep, &[]).await.unwrap().get::<_, i64>(0) != expected {
            assert!(Instant::now() < deadline, "it does not come true");
            sleep(Duration::from_millis(20)).await;
        }
    };
    sleeps(1).await;
    running.abort();
    sleeps(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_sslmode_encrypts_and_trusts_as_libpq_has_it() {
    let server = spawn_blocking(postgres::own).await.unwrap();
    let directory = std::env::temp_dir().join(format!("tls-test-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let (ours, foreign) = (Authority::new("ours"), Authority::new("foreign"));
    let trusted = ours.file(&directory, "ours.pem");
    let stranger = foreign.file(&directory, "foreign.pem");
    let by_name = server.url().replace("127.0.0.1", "localhost");
    let ask_url = |url: &str, settings: &str| format!("{url}?{settings}");
    let ask = async |url: &str, settings: String| is_encrypted(&ask_url(url, &settings)).await;
    let root = |file: &Path| format!("&sslrootcert={}", file.display());
    let refused = |answer: Result<bool, StoreError>| {
        let error = answer.expect_err("it was trusted");
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    };

    speak_tls(&server, Some(ours.sign("localhost"))).await;
    assert!(!ask(&by_name, "sslmode=disable".into()).await.unwrap());
    for trusting in ["", "sslmode=allow", "sslmode=prefer", "sslmode=require"] {
        assert!(ask(&by_name, trusting.into()).await.unwrap(), "{trusting}");
    }
    for checking in ["require", "verify-ca", "verify-full"] {
        let with = |file: &Path| format!("sslmode={checking}{}", root(file));
        assert!(ask(&by_name, with(&trusted)).await.unwrap(), "{checking}");
        refused(ask(&by_name, with(&stranger)).await);
    }
    // Nothing on this machine trusts the test's own authority.
    refused(ask(&by_name, "sslmode=verify-full".into()).await);

    // The right authority and another name.
    let by_address = server.url();
    let with = |mode: &str| format!("sslmode={mode}{}", root(&trusted));
    assert!(ask(&by_address, with("verify-ca")).await.unwrap());
    refused(ask(&by_address, with("verify-full")).await);

    // What calls a statement off is encrypted as well: without, it would not be sent.
    is_called_off(&ask_url(&by_name, &with("verify-full"))).await;

    // A server without TLS.
    speak_tls(&server, None).await;
    for content in ["disable", "allow", "prefer"] {
        assert!(!ask(&by_name, format!("sslmode={content}")).await.unwrap(), "{content}");
    }
    for needing in ["require", "verify-ca", "verify-full"] {
        refused(ask(&by_name, with(needing)).await);
    }
    std::fs::remove_dir_all(&directory).unwrap();
}
