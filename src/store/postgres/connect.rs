//! From a URL to a connection: what the URL says, which host, and how long each may take.

use std::{
    borrow::Cow,
    error::Error,
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::atomic::{AtomicUsize, Ordering},
    task::{Context, Poll},
    time::Duration,
};

use deadpool_postgres::Connect;
use percent_encoding::percent_decode_str;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::JoinHandle,
    time::timeout,
};
use tokio_postgres::{
    CancelToken, Client, Config, NoTls, Socket,
    config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs},
    tls::MakeTlsConnect,
};

/// Where the database is and how to connect to it.
pub(super) struct Target {
    /// One configuration for each host of the URL.
    hosts: Vec<Config>,
    tls: Tls,
    /// For the whole handshake with one host. The driver's own bound covers TCP only, and a host
    /// that accepts and says nothing would keep the next one from being tried.
    timeout: Duration,
    /// The host to begin with: the one that answered last, or the one after the last that did not.
    first: AtomicUsize,
    /// What is sent first on each connection.
    settings: Option<String>,
}

/// How connections are encrypted.
#[derive(Clone)]
pub(super) enum Tls {
    Off,
    #[cfg(feature = "tls")]
    On(tokio_postgres_rustls::MakeRustlsConnect),
}

impl Tls {
    /// Asks the server to end the statement that is under way.
    pub(super) async fn cancel(self, running: CancelToken) -> Result<(), tokio_postgres::Error> {
        match self {
            Self::Off => running.cancel_query(NoTls).await,
            #[cfg(feature = "tls")]
            Self::On(tls) => running.cancel_query(tls).await,
        }
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "Off",
            #[cfg(feature = "tls")]
            Self::On(_) => "On",
        })
    }
}

/// How much of the server's certificate is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verify {
    Nothing,
    Chain,
    ChainAndName,
}

type Fault = Box<dyn Error + Send + Sync>;

impl Target {
    /// Reads a URL. What libpq knows and the driver does not is read here: `sslmode=verify-ca`,
    /// `verify-full` and `allow`, `sslrootcert`, `target_session_attrs=primary`.
    pub(super) fn parse(url: &str, connect_timeout: Option<Duration>) -> Result<Self, Fault> {
        let (rest, ours) = Ours::taken_from(url)?;
        let mut config: Config = rest.parse()?;
        let tls = ours.apply(&mut config)?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err("the database URL names no host".into());
        }
        let timeout = connect_timeout
            .or(config.get_connect_timeout().copied())
            .unwrap_or(DEFAULT_CONNECT_TIMEOUT);
        let hosts = one_for_each_host(&config, timeout)?;
        let first = match config.get_load_balance_hosts() {
            LoadBalanceHosts::Random => getrandom::u32()? as usize % hosts.len(),
            _ => 0,
        };
        Ok(Self { hosts, tls, timeout, first: AtomicUsize::new(first), settings: None })
    }

    /// The same with settings for each session.
    pub(super) fn with_settings(self, settings: String) -> Self {
        Self { settings: Some(settings), ..self }
    }

    pub(super) fn tls(&self) -> Tls {
        self.tls.clone()
    }

    /// The configuration of the first host, for the pool, which shows it and does not use it.
    pub(super) fn config(&self) -> Config {
        self.hosts.first().cloned().unwrap_or_default()
    }

    async fn connect_to_any(&self) -> Result<(Client, JoinHandle<()>), tokio_postgres::Error> {
        let first = self.first.load(Ordering::Relaxed);
        let mut last = None;
        for place in 0..self.hosts.len() {
            let place = (first + place) % self.hosts.len();
            let Some(host) = self.hosts.get(place) else { continue };
            let connected = match self.tls.clone() {
                Tls::Off => self.handshake(host, NoTls).await,
                #[cfg(feature = "tls")]
                Tls::On(tls) => self.handshake(host, tls).await,
            };
            match connected {
                Ok(connected) => {
                    self.first.store(place, Ordering::Relaxed);
                    return Ok(connected);
                }
                Err(error) => {
                    tracing::debug!(
                        host = ?host.get_hosts(),
                        error = &error as &dyn Error,
                        "could not connect to Postgres",
                    );
                    // Should the time be over before another one is tried, it is first next time.
                    self.first.store((place + 1) % self.hosts.len(), Ordering::Relaxed);
                    last = Some(error);
                }
            }
        }
        match last {
            Some(error) => Err(error),
            None => Err(broken("there is no host to connect to".into()).await),
        }
    }

    /// Connects, within the bound, and drives the connection on a task of its own.
    async fn handshake<T>(
        &self,
        host: &Config,
        tls: T,
    ) -> Result<(Client, JoinHandle<()>), tokio_postgres::Error>
    where
        T: MakeTlsConnect<Socket>,
        T::Stream: Send + 'static,
    {
        let connecting = async {
            let (client, connection) = host.connect(tls).await?;
            let driver = tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(
                        error = &error as &dyn Error,
                        "a connection to Postgres has ended",
                    );
                }
            });
            if let Some(settings) = &self.settings {
                client.batch_execute(settings).await?;
            }
            Ok((client, driver))
        };
        match timeout(self.timeout, connecting).await {
            Ok(connected) => connected,
            Err(_) => {
                let (host, bound) = (host.get_hosts(), self.timeout);
                Err(broken(format!("no connection to {host:?} within {bound:?}")).await)
            }
        }
    }
}

impl Connect for Target {
    fn connect(
        &self,
        _: &Config,
    ) -> Pin<
        Box<
            dyn Future<Output = Result<(Client, JoinHandle<()>), tokio_postgres::Error>>
                + Send
                + '_,
        >,
    > {
        Box::pin(self.connect_to_any())
    }
}

/// The settings of a URL that the driver does not know.
#[derive(Default)]
struct Ours {
    sslmode: Option<String>,
    sslrootcert: Option<String>,
    primary: bool,
}

impl Ours {
    /// The URL without them. The key-value form is left to the driver.
    fn taken_from(url: &str) -> Result<(Cow<'_, str>, Self), Fault> {
        let mut ours = Self::default();
        let is_url = url.starts_with("postgres://") || url.starts_with("postgresql://");
        let Some((address, query)) = url.split_once('?').filter(|_| is_url) else {
            return Ok((Cow::Borrowed(url), ours));
        };
        let mut rest = Vec::new();
        for setting in query.split('&') {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            let value = || Ok::<_, Fault>(percent_decode_str(value).decode_utf8()?.into_owned());
            match name {
                "sslmode" => ours.sslmode = Some(value()?),
                "sslrootcert" => ours.sslrootcert = Some(value()?),
                "target_session_attrs" if value()? == "primary" => ours.primary = true,
                "sslcert" | "sslkey" | "sslpassword" => {
                    return Err(format!(
                        "client certificates ({name}) are not supported in the URL; build a pool \
                         with them and use PgStore::from_pool"
                    )
                    .into());
                }
                _ => rest.push(setting),
            }
        }
        Ok((Cow::Owned(format!("{address}?{}", rest.join("&"))), ours))
    }

    fn apply(&self, config: &mut Config) -> Result<Tls, Fault> {
        match config.get_target_session_attrs() {
            TargetSessionAttrs::ReadOnly => {
                return Err("target_session_attrs=read-only: claims are writes, \
                            name the primary or use read-write"
                    .into());
            }
            // Of several hosts only the one that writes is of use.
            _ if self.primary || config.get_hosts().len() > 1 => {
                config.target_session_attrs(TargetSessionAttrs::ReadWrite);
            }
            _ => {}
        }
        if config.get_application_name().is_none() {
            config.application_name(env!("CARGO_PKG_NAME"));
        }

        let roots = self.sslrootcert.as_deref();
        let (mode, verify) = match self.sslmode.as_deref() {
            // The key-value form, or no word about it.
            None => (config.get_ssl_mode(), Verify::Nothing),
            Some("disable") => (SslMode::Disable, Verify::Nothing),
            Some("allow" | "prefer") => (SslMode::Prefer, Verify::Nothing),
            // As libpq has it: with a root certificate, `require` checks the chain.
            Some("require") if roots.is_some() => (SslMode::Require, Verify::Chain),
            Some("require") => (SslMode::Require, Verify::Nothing),
            Some("verify-ca") => (SslMode::Require, Verify::Chain),
            Some("verify-full") => (SslMode::Require, Verify::ChainAndName),
            Some(other) => {
                return Err(format!(
                    "sslmode={other:?} is none of disable, allow, prefer, require, verify-ca, \
                     verify-full"
                )
                .into());
            }
        };
        config.ssl_mode(mode);
        tls(mode, verify, roots)
    }
}

#[cfg(feature = "tls")]
fn tls(mode: SslMode, verify: Verify, roots: Option<&str>) -> Result<Tls, Fault> {
    match mode {
        SslMode::Disable => Ok(Tls::Off),
        _ => super::tls::connector(verify, roots).map(Tls::On),
    }
}

#[cfg(not(feature = "tls"))]
fn tls(mode: SslMode, _: Verify, _: Option<&str>) -> Result<Tls, Fault> {
    match mode {
        SslMode::Disable => Ok(Tls::Off),
        SslMode::Prefer => {
            tracing::warn!(
                "connections to Postgres are not encrypted: sslmode is prefer and tower-dedupe is \
                 built without its feature `tls`",
            );
            Ok(Tls::Off)
        }
        _ => Err("this sslmode needs tower-dedupe's feature `tls`, which is not built in".into()),
    }
}

/// The same configuration for each host alone, since the driver tries them without a bound.
///
/// A name may have several addresses, and the first may be gone: half of the bound is for one.
fn one_for_each_host(config: &Config, bound: Duration) -> Result<Vec<Config>, Fault> {
    let (hosts, addresses, ports) =
        (config.get_hosts(), config.get_hostaddrs(), config.get_ports());
    let count = hosts.len().max(addresses.len());
    if !hosts.is_empty() && !addresses.is_empty() && hosts.len() != addresses.len() {
        return Err("the database URL has as many hostaddr as host, or none".into());
    }
    if ports.len() > 1 && ports.len() != count {
        return Err("the database URL has as many ports as hosts, or one".into());
    }
    let one = |place: usize| {
        let mut one = without_hosts(config);
        one.connect_timeout(bound / 2);
        match hosts.get(place) {
            Some(Host::Tcp(name)) => drop(one.host(name)),
            #[cfg(unix)]
            Some(Host::Unix(path)) => drop(one.host_path(path)),
            None => {}
        }
        if let Some(address) = addresses.get(place) {
            one.hostaddr(*address);
        }
        if let Some(port) = ports.get(place).or(ports.first()) {
            one.port(*port);
        }
        one
    };
    Ok((0..count).map(one).collect())
}

fn without_hosts(config: &Config) -> Config {
    let mut bare = Config::new();
    if let Some(user) = config.get_user() {
        bare.user(user);
    }
    if let Some(password) = config.get_password() {
        bare.password(password);
    }
    if let Some(database) = config.get_dbname() {
        bare.dbname(database);
    }
    if let Some(options) = config.get_options() {
        bare.options(options);
    }
    if let Some(name) = config.get_application_name() {
        bare.application_name(name);
    }
    if let Some(timeout) = config.get_tcp_user_timeout() {
        bare.tcp_user_timeout(*timeout);
    }
    if let Some(interval) = config.get_keepalives_interval() {
        bare.keepalives_interval(interval);
    }
    if let Some(retries) = config.get_keepalives_retries() {
        bare.keepalives_retries(retries);
    }
    bare.ssl_mode(config.get_ssl_mode())
        .ssl_negotiation(config.get_ssl_negotiation())
        .keepalives(config.get_keepalives())
        .keepalives_idle(config.get_keepalives_idle())
        .target_session_attrs(config.get_target_session_attrs())
        .channel_binding(config.get_channel_binding())
        .load_balance_hosts(config.get_load_balance_hosts());
    bare
}

/// An error of the driver with a message of ours, which it gives only for a stream that fails.
async fn broken(message: String) -> tokio_postgres::Error {
    let mut config = Config::new();
    config.user("nobody").ssl_mode(SslMode::Disable);
    match config.connect_raw(Broken(message), NoTls).await {
        Err(error) => error,
        Ok(_) => unreachable!("there is no handshake on a stream that fails every write"),
    }
}

/// A stream on which every read and write fails.
struct Broken(String);

impl Broken {
    fn error(&self) -> io::Error {
        io::Error::new(io::ErrorKind::TimedOut, self.0.clone())
    }
}

impl AsyncRead for Broken {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Poll::Ready(Err(self.error()))
    }
}

impl AsyncWrite for Broken {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(self.error()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Err(self.error()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
