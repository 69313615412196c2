//! A proxy in front of a server that loses, holds and cuts what passes it, as a test tells it.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
};

/// What happens to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// They are passed on.
    Flows,
    /// They are accepted and kept, and nothing on them goes anywhere: a network that drops packets.
    Vanishes,
    /// They are closed, the ones that are open too.
    IsClosed,
    /// Those that are open vanish for good, new ones are passed on: a host that was replaced, or a
    /// gateway that has forgotten them.
    OldVanishes,
}

/// When a connection is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// What the client sent does not reach the server.
    BeforeTheServer,
    /// It does, and the server has answered, and the answer does not reach the client.
    BeforeTheAnswer,
}

#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    traffic: watch::Sender<Traffic>,
    /// The client's writes until the cut.
    cut: Mutex<Option<(usize, Moment)>>,
    round_trips: AtomicUsize,
}

impl Proxy {
    /// A proxy in front of a port on this machine.
    pub async fn before(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            upstream: SocketAddr::from(([127, 0, 0, 1], port)),
            traffic: watch::Sender::new(Traffic::Flows),
            cut: Mutex::default(),
            round_trips: AtomicUsize::new(0),
        });
        let proxy = Self { address, shared: shared.clone() };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(shared.clone().pass(client));
            }
        });
        proxy
    }

    /// The URL, with this proxy in the place of its host and port.
    pub fn instead_of_host(&self, url: &str) -> String {
        let (credentials, rest) = url.split_once('@').unwrap();
        let (_, path) = rest.split_once('/').unwrap();
        format!("{credentials}@{}/{path}", self.address)
    }

    pub fn traffic(&self, traffic: Traffic) {
        self.shared.traffic.send_replace(traffic);
    }

    /// Cuts the connection on which the client's n-th write from now on arrives (from 1).
    pub fn cut_at(&self, write: usize, moment: Moment) {
        *self.shared.cut.lock().unwrap() = Some((write, moment));
    }

    /// Whether a cut is still to come.
    pub fn cuts_no_more(&self) -> bool {
        self.shared.cut.lock().unwrap().is_none()
    }

    /// Takes back a cut that has not come.
    pub fn cut_nothing(&self) {
        *self.shared.cut.lock().unwrap() = None;
    }

    /// How often the client has spoken after it had heard the server.
    pub fn round_trips(&self) -> usize {
        self.shared.round_trips.load(Ordering::SeqCst)
    }
}

impl Shared {
    async fn pass(self: Arc<Self>, mut client: TcpStream) {
        let mut traffic = self.traffic.subscribe();
        loop {
            let now = *traffic.borrow_and_update();
            match now {
                Traffic::Flows | Traffic::OldVanishes => break,
                Traffic::IsClosed => return,
                Traffic::Vanishes => traffic.changed().await.unwrap_or_default(),
            }
        }
        let Ok(mut server) = TcpStream::connect(self.upstream).await else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        let (from_client, mut to_client) = client.split();
        let (from_server, mut to_server) = server.split();
        let mut from_client = Heard::on(from_client);
        let mut from_server = Heard::on(from_server);
        let mut server_spoke = true;
        loop {
            let now = *traffic.borrow_and_update();
            tokio::select! {
                // What the test has said counts for all that is said after it.
                biased;
                changed = traffic.changed() => {
                    let becomes = *traffic.borrow();
                    if changed.is_err() || becomes == Traffic::IsClosed {
                        return;
                    }
                    if becomes == Traffic::OldVanishes {
                        // Kept, and never served again.
                        std::future::pending::<()>().await;
                    }
                }
                said = from_client.next(), if now != Traffic::Vanishes => {
                    let Some(said) = said else { return };
                    if std::mem::take(&mut server_spoke) {
                        self.round_trips.fetch_add(1, Ordering::SeqCst);
                    }
                    match self.comes_the_cut() {
                        Some(Moment::BeforeTheServer) => return,
                        Some(Moment::BeforeTheAnswer) => {
                            let _ = to_server.write_all(said).await;
                            from_server.next().await;
                            return;
                        }
                        None => if to_server.write_all(said).await.is_err() {
                            return;
                        }
                    }
                }
                said = from_server.next(), if now != Traffic::Vanishes => {
                    let Some(said) = said else { return };
                    server_spoke = true;
                    if to_client.write_all(said).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Counts a write of the client down to the cut.
    fn comes_the_cut(&self) -> Option<Moment> {
        let mut cut = self.cut.lock().unwrap();
        let (left, moment) = (*cut)?;
        *cut = (left > 1).then_some((left - 1, moment));
        cut.is_none().then_some(moment)
    }
}

/// One side's bytes, as they come.
struct Heard<'a> {
    from: tcp::ReadHalf<'a>,
    buffer: Vec<u8>,
}

impl<'a> Heard<'a> {
    fn on(from: tcp::ReadHalf<'a>) -> Self {
        Self { from, buffer: vec![0; 64 * 1024] }
    }

    /// What comes next; nothing at the end. Cancel-safe.
    async fn next(&mut self) -> Option<&[u8]> {
        match self.from.read(&mut self.buffer).await {
            Ok(0) | Err(_) => None,
            Ok(length) => self.buffer.get(..length),
        }
    }
}
