//! The examples as processes, which can be killed.

use std::{env, net::SocketAddr, path::PathBuf, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    task::spawn_blocking,
    time::timeout,
};

use super::{postgres, throwaway::Throwaway};

/// A running example.
#[derive(Debug)]
pub struct Example {
    process: Child,
    output: Lines<BufReader<ChildStdout>>,
    pub address: SocketAddr,
}

impl Example {
    /// Starts an example and waits until it listens.
    pub async fn start(name: &str, environment: &[(&str, &str)]) -> Self {
        let mut process = command(name)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = loop {
            let line = timeout(PATIENCE, output.next_line()).await.expect("it does not listen");
            let line = line.unwrap().expect("it ended before it listened");
            if let Some(address) = line.strip_prefix("listening on http://") {
                break address.parse().unwrap();
            }
        };
        Self { process, output, address }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.process.id().unwrap()
    }

    /// Kills it with SIGKILL.
    pub async fn kill(mut self) {
        self.process.kill().await.unwrap();
    }

    /// Waits until it has ended by itself; gives its exit code, if it was not a signal.
    pub async fn ended(mut self) -> Option<i32> {
        let reading = async { while let Ok(Some(_)) = self.output.next_line().await {} };
        let (ended, ()) = timeout(PATIENCE, async { tokio::join!(self.process.wait(), reading) })
            .await
            .expect("it does not end");
        ended.unwrap().code()
    }
}

/// An example whose durable database outlives its processes.
pub struct OnDatabase {
    example: &'static str,
    pub url: String,
    _database: Throwaway,
}

impl OnDatabase {
    pub async fn of(example: &'static str) -> Self {
        let database = spawn_blocking(postgres::own).await.unwrap();
        Self { example, url: database.url(), _database: database }
    }

    /// Starts a process, with a lease of [`LEASE`].
    pub async fn start(&self) -> Example {
        Example::start(self.example, &[("DATABASE_URL", &self.url), ("LEASE", "2s")]).await
    }
}

/// Of processes that are killed.
pub const LEASE: Duration = Duration::from_secs(2);

/// An example, built together with the tests.
pub fn command(name: &str) -> Command {
    // This test is in `target/…/deps`, the examples beside that directory.
    let this = env::current_exe().unwrap();
    let directory = this.parent().and_then(|deps| deps.parent()).unwrap();
    let example: PathBuf = directory.join("examples").join(name);
    assert!(
        example.is_file(),
        "{} is missing: run `cargo build --examples` with the profile of the tests, or all of \
         `cargo test`, which builds them first",
        example.display(),
    );
    let mut command = Command::new(example);
    command.env_remove("DATABASE_URL").env_remove("LEASE").env("PORT", "0").stdin(Stdio::null());
    command
}

const PATIENCE: Duration = Duration::from_secs(60);
