//! What is logged of a key: its beginning, or nothing.

use std::{
    convert::Infallible,
    io,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, ServiceExt, service_fn};
use tower_dedupe::{
    DedupeBody, DedupeLayer, Fingerprint, KeySource,
    key::{KeyAudit, KeyMistake},
    store::StoreErrorKind,
};
use tracing_subscriber::fmt::MakeWriter;

use crate::support::scripted::{Call, Fault, Scripted};

/// Everything that is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, written: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(written);
        Ok(written.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

/// Sends requests that go wrong in each way that is logged; gives the log.
async fn log_of(layer: impl Fn(DedupeLayer<Scripted>) -> DedupeLayer<Scripted>) -> String {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    let logging = tracing::subscriber::set_default(subscriber);
    let store = Scripted::new();
    store.next(Call::Claim, [Fault::Refuse(StoreErrorKind::Unavailable), Fault::LoseReply]);
    store.next(Call::Complete, [Fault::Refuse(StoreErrorKind::Unknown)]);
    store.next(Call::Fail, [Fault::Refuse(StoreErrorKind::Unknown)]);
    // A key from the path, and half of a composite.
    let from_path = KeySource::from_fn(|parts| Ok(Some(parts.uri.path().to_owned())));
    let layers = [
        layer(DedupeLayer::new(store.clone(), KeySource::header("x-id").unwrap())),
        layer(DedupeLayer::new(store, from_path.and(KeySource::header("x-none").unwrap()))),
    ];
    for layer in layers {
        let service = layer.layer(service_fn(|_: Request<DedupeBody<Full<Bytes>>>| async {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }));
        for _ in 0..4 {
            let path = format!("/hooks/for/the/inbox/of/{SECRET}");
            let request = Request::post(path).header("x-id", SECRET);
            let request = request.body(Full::default()).unwrap();
            service.clone().oneshot(request).await.unwrap();
            // What goes on in the background.
            tokio::time::sleep(std::time::Duration::from_secs(20)).await;
        }
    }
    drop(logging);
    let log = log.0.lock().unwrap().clone();
    String::from_utf8(log).unwrap()
}

const SECRET: &str = "alice.liddell@wonderland.example";

#[tokio::test(start_paused = true)]
async fn keys_are_logged_shortened_and_never_whole() {
    let log = log_of(|layer| layer.scope("s")).await;
    for told in [
        "could not claim the event key",
        "could not mark the key done",
        "could not free the key",
        "no event key",
    ] {
        assert!(log.contains(told), "{told:?} is not in the log:\n{log}");
    }
    assert!(log.contains("s/alice.liddel…(+20 bytes)"), "{log}");
    let about_keys = log.lines().filter(|line| !line.contains("no event key"));
    for line in about_keys {
        assert!(!line.contains(SECRET), "{line}");
    }
}

#[tokio::test(start_paused = true)]
async fn redacted_keys_are_not_logged_at_all_nor_the_path_that_may_have_them() {
    // The default scope is the path, which has the key too.
    let log = log_of(DedupeLayer::redact_keys).await;
    assert!(log.contains("could not claim the event key"), "{log}");
    assert!(log.contains("no event key"), "{log}");
    assert!(!log.contains("alice") && !log.contains("inbox"), "{log}");
}

/// What is wrong with keys is told without them: another payload, and what the audit finds.
#[tokio::test(start_paused = true)]
async fn conflicts_and_findings_are_logged_without_the_key() {
    let audit = KeyAudit::new();
    let layer = |layer: DedupeLayer<Scripted>| {
        layer.redact_keys().fingerprint(Fingerprint::Body.warn()).key_audit(audit.clone())
    };
    let log = log_of(layer).await;
    assert!(!log.contains("looks like a mistake") && !log.contains("another payload"), "{log}");
    assert!(audit.findings().is_empty());

    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    let logging = tracing::subscriber::set_default(subscriber);
    let source = KeySource::header("x-id").unwrap();
    let layer = layer(DedupeLayer::new(Scripted::new(), source).scope("s"));
    let service = layer.layer(service_fn(|_: Request<DedupeBody<Full<Bytes>>>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    for body in ["created", "sent", "paid", "paid", "void"] {
        let request = Request::post("/").header("x-id", SECRET).body(Full::from(body)).unwrap();
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), 200);
    }
    drop(logging);
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    // The others are duplicates by then, and only looked at.
    assert_eq!(log.matches("used with another payload: it goes on").count(), 4, "{log}");
    assert_eq!(log.matches("looks like a mistake").count(), 1, "{log}");
    assert!(log.contains("header:x-id") && log.contains("key-shared"), "{log}");
    assert!(!log.contains("alice"), "{log}");
    let [finding] = &audit.findings()[..] else { panic!("one finding was expected") };
    assert_eq!((finding.times(), finding.mistake()), (2, KeyMistake::KeyShared));
}
