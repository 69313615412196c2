//! What finding a key in a JSON body costs, against parsing the body whole:
//!
//!     cargo bench --bench key
//!
//! The figures are good as ratios of one run.

#![allow(clippy::unwrap_used, unreachable_pub, missing_docs)]

use std::{fmt, fmt::Write};

use divan::{Bencher, black_box, counter::BytesCount};
use http::Request;
use serde_json::Value;
use tower_dedupe::KeySource;

fn main() {
    divan::main();
}

/// The key of a JSON body, as the layer finds it.
#[divan::bench(args = samples())]
fn json_key(bencher: Bencher<'_, '_>, sample: &Sample) {
    let source = KeySource::json(sample.path).unwrap();
    let (parts, ()) = Request::post("/").body(()).unwrap().into_parts();
    bencher
        .counter(BytesCount::new(sample.json.len()))
        .bench(|| source.find(&parts, black_box(sample.json.as_bytes())).unwrap());
}

/// The same by parsing the body whole.
#[divan::bench(args = samples())]
fn json_value(bencher: Bencher<'_, '_>, sample: &Sample) {
    let pointer = sample.path.replace('$', "").replace('.', "/");
    bencher.counter(BytesCount::new(sample.json.len())).bench(|| {
        let value: Value = serde_json::from_slice(black_box(sample.json.as_bytes())).unwrap();
        value.pointer(&pointer).unwrap().as_str().unwrap().to_owned()
    });
}

/// A body as webhooks have it, with the key at some place.
struct Sample {
    name: String,
    path: &'static str,
    json: String,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

fn samples() -> Vec<Sample> {
    let mut samples = Vec::new();
    for (size, bytes) in [("1 kB", 1_000), ("100 kB", 100_000), ("2 MB", 2_000_000)] {
        for (place, before) in [("first", 0), ("amid", bytes / 2), ("last", bytes)] {
            let json = body(before, bytes);
            samples.push(Sample { name: format!("{size}, {place}"), path: "$.event.id", json });
        }
    }
    samples
}

/// Orders with names, amounts, flags and texts with escapes, and the event among them.
fn body(before: usize, bytes: usize) -> String {
    let mut json = String::from("{\"version\":3");
    let mut n = 0;
    let mut is_there = false;
    while json.len() < bytes || !is_there {
        if json.len() >= before && !is_there {
            json.push_str(
                r#","event":{"type":"order.paid","id":"evt_3OqL2c2eZvKYlo2C","live":true}"#,
            );
            is_there = true;
        }
        let _ = write!(
            json,
            r#","order_{n}":{{"id":"ord_{n:012}","amount":{}.{:02},"paid":{},"note":null,"customer":{{"name":"Zoë \"{n}\" O'Neil","mail":"zoe.{n}@example.com","text":"line one\nline two, with a tab\t\u00e9"}},"items":[{n},{},{}]}}"#,
            n % 997,
            n % 100,
            n % 2 == 0,
            n * 7,
            n * 13,
        );
        n += 1;
    }
    json.push('}');
    json
}
