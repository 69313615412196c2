//! A Postgres server of one's own, for a while: found on this machine, started on a free port,
//! and gone with its directory when its owner is, whatever way the owner ends.

use std::{
    env, error, fmt, fs, io,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::{
        fs::{DirBuilderExt, MetadataExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Whether what is committed survives a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// As Postgres comes: every commit reaches the disk.
    Durable,
    /// Nothing is flushed: faster, for tests in which the server does not crash.
    Fast,
}

/// A running server. Dropped, it is stopped and its directory removed; if the process that owns it
/// is killed, a watchdog does so.
#[derive(Debug)]
pub struct Throwaway {
    binaries: PathBuf,
    directory: PathBuf,
    user: Option<String>,
    password: String,
    port: u16,
    durability: Durability,
    watchdog: Watchdog,
}

/// Why there is no server.
#[derive(Debug)]
pub enum NoServer {
    /// There are no server binaries on this machine; these are the places that were looked at.
    NotInstalled(Vec<PathBuf>),
    /// The binaries are there, and did not work.
    Broken(String),
}

impl fmt::Display for NoServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInstalled(places) => write!(
                f,
                "no Postgres server on this machine: install it (Debian and Ubuntu: apt-get \
                 install postgresql; macOS: brew install postgresql). Looked for initdb and \
                 postgres in {places:?}"
            ),
            Self::Broken(what) => write!(f, "could not start a throwaway Postgres: {what}"),
        }
    }
}

impl error::Error for NoServer {}

impl From<io::Error> for NoServer {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

impl Throwaway {
    /// Makes a cluster and starts it.
    pub fn start(durability: Durability) -> Result<Self, NoServer> {
        let binaries = find_binaries()?;
        let directory = env::temp_dir().join(format!("throwaway-postgres-{}", random()?));
        fs::DirBuilder::new().mode(0o700).create(&directory)?;
        let user = server_user(&directory)?;
        let mut server = Self {
            watchdog: Watchdog::over(&directory)?,
            binaries,
            directory,
            user,
            // Whoever connects on loopback may be anyone on this machine.
            password: random()?,
            port: 0,
            durability,
        };
        let password = server.directory.join("password");
        fs::write(&password, &server.password)?;
        server.own(&password)?;
        let made = server
            .command("initdb")
            .args(["--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"])
            .arg(format!("--pwfile={}", password.display()))
            .args(if durability == Durability::Fast { &["--no-sync"][..] } else { &[] })
            .arg("--pgdata")
            .arg(server.data())
            .output()?;
        check("initdb", &made)?;
        server.start_on_some_port()?;
        Ok(server)
    }

    /// Where to connect.
    pub fn url(&self) -> String {
        format!("postgres://postgres:{}@127.0.0.1:{}/postgres", self.password, self.port)
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where the cluster is.
    pub fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// Stops the server as a restart does: sessions are ended, what is committed is flushed.
    pub fn stop(&self) -> Result<(), NoServer> {
        let stopped = self
            .command("pg_ctl")
            .args(["stop", "--mode=fast", "--wait", "--timeout=30", "--pgdata"])
            .arg(self.data())
            .output()?;
        check("pg_ctl stop", &stopped)
    }

    /// Kills the server and all its sessions with SIGKILL, as a lost machine does.
    pub fn kill(&self) -> Result<(), NoServer> {
        let pid = self.pid()?;
        let pids = family(pid);
        signal("KILL", &pids)?;
        let deadline = Instant::now() + PATIENCE;
        while pids.iter().any(|pid| is_alive(*pid)) {
            if Instant::now() > deadline {
                return Err(NoServer::Broken("the killed server is still there".into()));
            }
            thread::sleep(PAUSE);
        }
        // Where nobody collects the dead, the next server would take this one for alive.
        fs::remove_file(self.data().join("postmaster.pid"))?;
        Ok(())
    }

    /// Stops all its processes where they are: it neither answers nor closes a connection, until
    /// what is returned is dropped.
    pub fn freeze(&self) -> Result<Frozen, NoServer> {
        let pids = family(self.pid()?);
        signal("STOP", &pids)?;
        Ok(Frozen(pids))
    }

    /// Starts it again, on the same port and data.
    pub fn start_again(&self) -> Result<(), NoServer> {
        let started = self
            .command("pg_ctl")
            .args(["start", "--wait", "--timeout=60", "--silent", "--log"])
            .arg(self.directory.join("log"))
            .arg("--pgdata")
            .arg(self.data())
            .arg("--options")
            .arg(self.options())
            // The server must not keep the owner's output open.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
        if !started.success() {
            let log = fs::read_to_string(self.directory.join("log")).unwrap_or_default();
            return Err(NoServer::Broken(format!("the server did not start: {log}")));
        }
        Ok(())
    }

    fn start_on_some_port(&mut self) -> Result<(), NoServer> {
        let mut last = None;
        for _ in 0..5 {
            // Somebody may take the port between here and the server's start: then another one.
            self.port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            match self.start_again() {
                Ok(()) => return self.accepts(),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| NoServer::Broken("no port".into())))
    }

    fn accepts(&self) -> Result<(), NoServer> {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) {
            if Instant::now() > deadline {
                return Err(error.into());
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn options(&self) -> String {
        let mut options = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' \
             -c max_connections=200 -c logging_collector=off",
            self.port
        );
        if self.durability == Durability::Fast {
            options.push_str(" -c fsync=off -c synchronous_commit=off -c full_page_writes=off");
        }
        options
    }

    fn pid(&self) -> Result<u32, NoServer> {
        let file = self.data().join("postmaster.pid");
        let text = fs::read_to_string(file)?;
        let pid = text.lines().next().and_then(|line| line.trim().parse().ok());
        pid.ok_or_else(|| NoServer::Broken("postmaster.pid has no pid".into()))
    }

    /// A server program, run as the user that may run it.
    fn command(&self, program: &str) -> Command {
        let program = self.binaries.join(program);
        let mut command = match &self.user {
            None => Command::new(program),
            Some(user) => as_user(user, &program),
        };
        command
            .stdin(Stdio::null())
            .current_dir(&self.directory)
            // Settings of the owner's shell are not for this server.
            .env_remove("PGDATA")
            .env_remove("PGPORT")
            .env_remove("PGHOST")
            .env_remove("PGOPTIONS")
            // Ctrl-C in the owner's terminal is not for this server; the watchdog stops it.
            .process_group(0);
        command
    }

    fn own(&self, path: &Path) -> Result<(), NoServer> {
        match &self.user {
            None => Ok(()),
            Some(user) => chown(user, path),
        }
    }
}

impl Drop for Throwaway {
    fn drop(&mut self) {
        self.watchdog.finish();
    }
}

/// Processes that stand still while this lives.
#[derive(Debug)]
pub struct Frozen(Vec<u32>);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = signal("CONT", &self.0);
    }
}

/// A shell that waits for its owner's end, then stops the server and removes the directory.
#[derive(Debug)]
struct Watchdog {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Watchdog {
    fn over(directory: &Path) -> io::Result<Self> {
        // `read` ends when the other side of the pipe is closed, which the kernel does for an owner
        // that was killed. QUIT to the postmaster is an immediate shutdown.
        let script = r#"
            trap '' INT TERM HUP
            read -r _
            pid=$(head -n 1 "$1/data/postmaster.pid" 2>/dev/null)
            if [ -n "$pid" ]; then
                kill -CONT "$pid" 2>/dev/null
                kill -QUIT "$pid" 2>/dev/null
                n=0
                while kill -0 "$pid" 2>/dev/null && [ $n -lt 100 ]; do sleep 0.05; n=$((n + 1)); done
                kill -KILL "$pid" 2>/dev/null
            fi
            n=0
            while ! rm -rf "$1" 2>/dev/null && [ $n -lt 40 ]; do sleep 0.05; n=$((n + 1)); done
        "#;
        let mut child = Command::new("sh")
            .args(["-c", script, "throwaway-postgres"])
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    /// Lets it do its work now, and waits for it.
    fn finish(&mut self) {
        if let Some(mut pipe) = self.pipe.take() {
            let _ = pipe.write_all(b"\n");
        }
        let _ = self.child.wait();
    }
}

/// The directory of the newest server binaries.
fn find_binaries() -> Result<PathBuf, NoServer> {
    let mut places: Vec<PathBuf> =
        env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
    if let Ok(output) = Command::new("pg_config").arg("--bindir").output() {
        places.push(String::from_utf8_lossy(&output.stdout).trim().into());
    }
    for (parent, suffix) in [
        ("/usr/lib/postgresql", "bin"),
        ("/usr/local/opt", "bin"),
        ("/opt/homebrew/opt", "bin"),
        ("/Applications/Postgres.app/Contents/Versions", "bin"),
    ] {
        let mut versions: Vec<_> = fs::read_dir(parent)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| {
                !parent.ends_with("opt") || path.to_string_lossy().contains("postgresql")
            })
            .collect();
        versions.sort_by_key(|path| version(path));
        places.extend(versions.into_iter().rev().map(|path| path.join(suffix)));
    }
    let complete = |place: &&PathBuf| {
        ["initdb", "postgres", "pg_ctl"].iter().all(|program| place.join(program).is_file())
    };
    match places.iter().find(complete) {
        // A link into the real directory would hide what lies beside the binaries.
        Some(place) => Ok(fs::canonicalize(place.join("postgres"))
            .ok()
            .and_then(|real| real.parent().map(Path::to_owned))
            .filter(|real| complete(&real))
            .unwrap_or_else(|| place.clone())),
        None => Err(NoServer::NotInstalled(places)),
    }
}

/// The number in a path such as `postgresql@16` or `/usr/lib/postgresql/15`.
fn version(path: &Path) -> u32 {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let digits: String = name.chars().filter(char::is_ascii_digit).take(2).collect();
    digits.parse().unwrap_or(0)
}

/// 128 random bits.
fn random() -> io::Result<String> {
    let mut random = [0u8; 16];
    fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Postgres refuses to run as root: then the directory is given to a user who may.
fn server_user(directory: &Path) -> Result<Option<String>, NoServer> {
    // The directory is new, so its owner is who we are.
    if fs::metadata(directory)?.uid() != 0 {
        return Ok(None);
    }
    let known = |user: &&str| {
        Command::new("id").args(["-u", user]).output().is_ok_and(|output| output.status.success())
    };
    let Some(user) = ["postgres", "nobody"].into_iter().find(known) else {
        return Err(NoServer::Broken(
            "it does not run as root, and there is no user postgres or nobody".into(),
        ));
    };
    chown(user, directory)?;
    Ok(Some(user.to_owned()))
}

fn chown(user: &str, path: &Path) -> Result<(), NoServer> {
    check("chown", &Command::new("chown").arg(user).arg(path).output()?)
}

/// The program as another user, by what this machine has for it.
fn as_user(user: &str, program: &Path) -> Command {
    let there = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
    if there("setpriv") {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", user, "--regid", &group_of(user), "--init-groups"]);
        command.arg(program);
        command
    } else if there("runuser") {
        let mut command = Command::new("runuser");
        command.args(["-u", user, "--"]).arg(program);
        command
    } else {
        let mut command = Command::new("sudo");
        command.args(["-n", "-u", user, "--"]).arg(program);
        command
    }
}

fn group_of(user: &str) -> String {
    let group = Command::new("id").args(["-g", user]).output();
    group
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}

/// A process and its children, by what the kernel or `ps` says of all processes.
fn family(parent: u32) -> Vec<u32> {
    let mut pids = vec![parent];
    if let Ok(processes) = fs::read_dir("/proc") {
        for process in processes.flatten() {
            let Ok(pid) = process.file_name().to_string_lossy().parse() else { continue };
            let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
            // "pid (name) state parent …", and the name may have anything in it.
            let after_name = stat.rsplit(')').next().unwrap_or_default();
            if after_name.split_whitespace().nth(1) == Some(&parent.to_string()) {
                pids.push(pid);
            }
        }
    } else if let Ok(output) = Command::new("ps").args(["-A", "-o", "pid=,ppid="]).output() {
        pids.extend(String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| {
            let mut ids = line.split_whitespace().filter_map(|id| id.parse::<u32>().ok());
            let (pid, of) = (ids.next()?, ids.next()?);
            (of == parent).then_some(pid)
        }));
    }
    pids
}

fn signal(name: &str, pids: &[u32]) -> Result<(), NoServer> {
    for pid in pids {
        // A child may have ended by itself.
        kill(name, *pid)?;
    }
    Ok(())
}

fn is_alive(pid: u32) -> bool {
    // A zombie whose parent has not looked is dead enough.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let zombie = stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z');
    !zombie && kill("0", pid).unwrap_or(false)
}

/// The shell's own `kill`, which every machine has. Says whether there was such a process.
fn kill(signal: &str, pid: u32) -> io::Result<bool> {
    let mut kill = Command::new("sh");
    kill.args(["-c", "kill -\"$1\" \"$2\"", "kill", signal, &pid.to_string()]);
    Ok(kill.stderr(Stdio::null()).status()?.success())
}

fn check(what: &str, output: &Output) -> Result<(), NoServer> {
    if output.status.success() {
        return Ok(());
    }
    Err(NoServer::Broken(format!(
        "{what}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    )))
}

const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
