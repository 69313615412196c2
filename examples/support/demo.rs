//! Drives the quickstart through every situation and prints what happened.

use std::{net::SocketAddr, process::ExitCode, time::Duration};

use tokio::{net::TcpListener, process::Child, time::sleep};

use super::{
    Fault, Fulfilments,
    client::{self, Answer},
    supervisor::{self, QUIET},
};

/// Short, since the demo waits for it.
const LEASE: Duration = Duration::from_secs(2);

/// Runs the demo; it fails if anything is not as promised.
pub async fn run(database: Option<&str>) -> Result<ExitCode, Fault> {
    let address = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let mut demo = Demo { address, database, server: None, broken: 0 };
    demo.start().await?;
    println!("\n{:<52} {:<28} kept?", "situation", "answer");
    demo.play().await?;
    demo.stop().await;
    Ok(match demo.broken {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

struct Demo<'a> {
    address: SocketAddr,
    /// Without one there is no process that may crash.
    database: Option<&'a str>,
    server: Option<Child>,
    broken: usize,
}

impl Demo<'_> {
    async fn play(&mut self) -> Result<(), Fault> {
        // Events of this run, on a database that may have seen others.
        let run = format!("{:08x}", getrandom());
        let body = |n: u32| format!(r#"{{"id": "demo_{run}_{n}"}}"#);
        let key = |n: u32| format!("demo_{run}_{n}");

        let answer = self.stripe(&body(1), "").await;
        self.row("a first delivery is handled", &answer, (200, ""));
        let answer = self.stripe(&body(1), "").await;
        self.row("the same again is a duplicate", &answer, (200, "duplicate"));

        let address = self.address;
        let slow = body(2);
        let (one, other) = tokio::join!(self.stripe(&slow, "slow:1"), self.stripe(&slow, "slow:1"));
        let (first, second) = if one.status == 200 { (one, other) } else { (other, one) };
        self.row("of two at once one is handled", &first, (200, ""));
        self.row("  and the other must come back", &second, (503, "in-progress"));

        let answer = self.stripe(&body(3), "fail").await;
        self.row("a handler fails", &answer, (500, ""));
        let answer = self.stripe(&body(3), "").await;
        self.row("  and the event is free at once", &answer, (200, ""));

        let gone = client::try_post(address, "/stripe", &[("x-demo", "panic")], body(4)).await;
        self.told("a handler panics", "connection closed", gone.is_err());
        let answer = self.stripe(&body(4), "").await;
        self.row("  and the event is free at once", &answer, (200, ""));

        let patience = Duration::from_millis(300);
        let slow = [("x-demo", "slow:1")];
        client::post_and_hang_up(address, "/stripe", &slow, body(5), patience).await;
        let answer = self.until("duplicate", &body(5)).await;
        self.row("a sender hangs up, and the handler finishes", &answer, (200, "duplicate"));

        let answer = self.stripe("{}", "").await;
        self.row("no key: handled, and said so", &answer, (200, "missing-key"));
        let answer = self.stripe(r#"{"id": 1.5}"#, "").await;
        self.row("what cannot be a key is refused", &answer, (400, "invalid-key"));
        let answer = self.stripe(&" ".repeat(3 << 20), "").await;
        self.row("so is a body without end", &answer, (413, "body-too-large"));

        let mut fulfilled = vec![(1, 1), (2, 1), (3, 2), (4, 2), (5, 1)];
        if self.database.is_some() {
            let gone = client::try_post(address, "/stripe", &[("x-demo", "crash")], body(6)).await;
            self.told("the process dies between claim and work", "connection lost", gone.is_err());
            self.start().await?;
            let answer = self.stripe(&body(6), "").await;
            self.row("  started again, it knows of the claim", &answer, (503, "in-progress"));
            let answer = self.until("", &body(6)).await;
            self.row("  and after the lease the event is handled", &answer, (200, ""));
            let answer = self.stripe(&body(6), "").await;
            self.row("  once", &answer, (200, "duplicate"));
            fulfilled.push((6, 2));
        } else {
            println!("(no crash is shown: there is no database that would survive it)");
        }

        let list = client::get(address, "/fulfilments").await;
        let list: Vec<serde_json::Value> = serde_json::from_slice(&list.body)?;
        for (n, attempt) in fulfilled {
            let rows: Vec<_> = list.iter().filter(|row| row["event_key"] == *key(n)).collect();
            let once = matches!(rows[..], [row] if row["attempt"] == attempt);
            let what = format!("event {n} was fulfilled once, by attempt {attempt}");
            self.told(&what, &format!("{} fulfilment(s)", rows.len()), once);
        }
        Ok(())
    }

    async fn stripe(&self, body: &str, wish: &str) -> Answer {
        client::post(self.address, "/stripe", &[("x-demo", wish)], body.to_owned()).await
    }

    /// Delivers again until the answer has this `dedupe-status`.
    async fn until(&self, status: &str, body: &str) -> Answer {
        let mut answer = self.stripe(body, "slow:0").await;
        for _ in 0..200 {
            if answer.header("dedupe-status").unwrap_or_default() == status {
                break;
            }
            sleep(Duration::from_millis(50)).await;
            answer = self.stripe(body, "slow:0").await;
        }
        answer
    }

    fn row(&mut self, situation: &str, answer: &Answer, (status, reason): (u16, &str)) {
        let said = answer.header("dedupe-status").unwrap_or_default();
        let retry = match answer.header("retry-after") {
            Some(seconds) => format!(", retry after {seconds}"),
            None => String::new(),
        };
        let kept = answer.status == status
            && said == reason
            && answer.header("retry-after").is_some() == (status == 503);
        self.told(situation, &format!("{} {said}{retry}", answer.status.as_u16()), kept);
    }

    fn told(&mut self, situation: &str, answer: &str, kept: bool) {
        println!("{situation:<52} {answer:<28} {}", if kept { "yes" } else { "NO" });
        self.broken += usize::from(!kept);
    }

    async fn start(&mut self) -> Result<(), Fault> {
        match self.database {
            Some(database) => {
                // The one that crashed has let go of the port when it is gone.
                self.stop().await;
                let (port, lease) = (self.address.port().to_string(), LEASE.as_secs().to_string());
                let environment = [("PORT", &*port), ("LEASE", &format!("{lease}s")), (QUIET, "")];
                self.server = Some(supervisor::start(database, &environment)?);
            }
            None => {
                let serving = super::serve(Fulfilments::in_memory(), self.address.port(), LEASE);
                tokio::spawn(serving);
            }
        }
        for _ in 0..200 {
            if tokio::net::TcpStream::connect(self.address).await.is_ok() {
                return Ok(());
            }
            sleep(Duration::from_millis(50)).await;
        }
        Err("the server did not start".into())
    }

    async fn stop(&mut self) {
        if let Some(mut server) = self.server.take() {
            drop(server.stdin.take());
            let _ = server.wait().await;
        }
    }
}

/// Tells runs apart.
fn getrandom() -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_micros() as u32)
}
