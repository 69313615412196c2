//! Keeps an example's server running in a process of its own, so that a crash of it, which is
//! part of the show, does not take the throwaway database along.

use std::{
    env, io,
    os::unix::process::ExitStatusExt,
    process::{ExitCode, Stdio},
    thread,
};

use tokio::{
    net::TcpListener,
    process::{Child, Command},
    select,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use super::server::Fault;

/// Runs the server and starts it again when it crashes, until it ends by itself or is told to stop.
pub async fn serve(database: &str, port: u16) -> Result<ExitCode, Fault> {
    // The same port after a restart.
    let port = match port {
        0 => TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port(),
        port => port,
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let port = port.to_string();
    let mut environment = vec![("PORT", &*port)];
    let mut told_to_stop = false;
    loop {
        let mut server = start(database, &environment)?;
        // Kept open for as long as the server is to run; `wait` would close it.
        let mut lifeline = server.stdin.take();
        let ended = loop {
            select! {
                ended = server.wait() => break ended?,
                _ = interrupt.recv() => told_to_stop = true,
                _ = terminate.recv() => told_to_stop = true,
            }
            if told_to_stop {
                drop(lifeline.take());
            }
        };
        // The terminal tells the server too; until it listens, it just dies of that.
        let stops = [SignalKind::interrupt(), SignalKind::terminate()];
        let stopped = |signal| stops.iter().any(|stop| stop.as_raw_value() == signal);
        if told_to_stop || ended.signal().is_none_or(stopped) {
            return Ok(if ended.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        println!("\n*** the server has crashed; starting it again ***\n");
        environment.push((QUIET, ""));
    }
}

/// The server, on this database, in a process that ends when this one does.
pub fn start(database: &str, environment: &[(&str, &str)]) -> Result<Child, Fault> {
    Ok(Command::new(env::current_exe()?)
        .env("DATABASE_URL", database)
        .env(SUPERVISED, "")
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?)
}

/// Ends when the process that supervises this one is gone or wants it to stop; never if there is
/// none.
pub async fn is_gone() {
    if env::var_os(SUPERVISED).is_none() {
        std::future::pending().await
    }
    // On a thread, since reading it cannot be called off.
    let (gone, is_gone) = oneshot::channel();
    thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        gone.send(())
    });
    let _ = is_gone.await;
}

/// Whether what to paste has been printed, or nobody wants to read it.
pub fn is_quiet() -> bool {
    env::var_os(QUIET).is_some()
}

const SUPERVISED: &str = "EXAMPLE_IS_SUPERVISED";
pub const QUIET: &str = "EXAMPLE_IS_QUIET";
