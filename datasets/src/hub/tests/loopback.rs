//! A Hub on loopback, for tests: repositories in the Hub's URL layout, and faults on demand.
//!
//! Small files are served directly, with their git hash as the etag. Larger files are redirected to
//! a storage path with their SHA-256, as the Hub does for LFS.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::hash::hexadecimal;

/// Commit of every repository.
pub(crate) const COMMIT: &str = "b08601e04326c79dfdd32d625aee71d232d685c3";

/// Files with more bytes are on the storage server.
const LARGE: usize = 1024;

/// A fault in the transfer of large files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Each connection is closed after this number of bytes.
    DropEvery(usize),
    /// The first connections send half of the contents and then stall.
    Stall(usize),
    /// The first connections send a wrong byte.
    Corrupt(usize),
    /// Ranges are ignored, and the first connections are closed halfway.
    IgnoreRange(usize),
    /// The first connections are answered with a status.
    Status(u16, usize),
    /// The server sends more bytes than it announced.
    Endless,
    /// The contents have a content encoding.
    Encoded,
    /// The storage redirects to itself.
    Ring,
}

/// The files of each repository, by its path: `datasets/owner/name` or `models/owner/name`.
pub(crate) type Repos = BTreeMap<String, BTreeMap<String, Vec<u8>>>;

struct HubState {
    repos: Repos,
    fault: Fault,
    token: Option<String>,
    /// The endpoint of the storage server, if it is a separate one.
    storage: Option<String>,
    /// The number of requests for contents.
    transfers: usize,
    requests: Vec<String>,
}

/// The server, which runs until the process ends.
pub(crate) struct Loopback {
    pub(crate) endpoint: String,
    state: Arc<Mutex<HubState>>,
}

struct Request {
    path: String,
    range: Option<(usize, Option<usize>)>,
    authorization: Option<String>,
}

impl Loopback {
    pub(crate) fn serve(repos: Repos, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = HubState {
            repos,
            fault,
            token: None,
            storage: None,
            transfers: 0,
            requests: Vec::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                // A disconnected client is not an error of the server.
                thread::spawn(move || answer(stream, &state).unwrap_or_default());
            }
        });
        Self { endpoint, state }
    }

    /// One data set.
    pub(crate) fn dataset(id: &str, files: &[(&str, &[u8])], fault: Fault) -> Self {
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec()));
        Self::serve(BTreeMap::from([(format!("datasets/{id}"), files.collect())]), fault)
    }

    /// Rejects requests without `token`.
    pub(crate) fn require(&self, token: &str) {
        self.state.lock().unwrap().token = Some(token.to_owned());
    }

    /// Keeps large files at another endpoint.
    pub(crate) fn store_at(&self, endpoint: &str) {
        self.state.lock().unwrap().storage = Some(endpoint.to_owned());
    }

    pub(crate) fn transfers(&self) -> usize {
        self.state.lock().unwrap().transfers
    }

    pub(crate) fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let mut request = Request { path, range: None, authorization: None };
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':')?;
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (from, to) = value.trim().strip_prefix("bytes=")?.split_once('-')?;
                request.range = Some((from.parse().ok()?, to.parse().ok()));
            }
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    Some(request)
}

fn answer(mut stream: TcpStream, state: &Mutex<HubState>) -> Option<()> {
    let request = read_request(&stream)?;
    let mut state = state.lock().unwrap();
    state.requests.push(request.path.clone());
    let expected = state.token.as_ref().map(|token| format!("Bearer {token}"));
    let path = request.path.trim_start_matches('/').replace("%20", " ");
    if let Some(digest) = path.strip_prefix("storage/") {
        // The storage server must not receive a token.
        assert_eq!(request.authorization, None);
        let mut contents = state.repos.values().flat_map(|files| files.values());
        let contents = contents.find(|bytes| sha256(bytes) == digest)?.clone();
        state.transfers += 1;
        let (transfer, fault) = (state.transfers, state.fault);
        drop(state);
        return send_faulty(&mut stream, &request, contents, fault, transfer);
    }
    if expected.is_some() && request.authorization != expected {
        return send(&mut stream, "401 Unauthorized", &[], b"");
    }
    let found = route(&state.repos, &path);
    let storage = state.storage.clone();
    drop(state);
    match found {
        Some(Found::Listing(json)) => send(&mut stream, "200 OK", &[], json.as_bytes()),
        Some(Found::Small(bytes)) => {
            let etag = format!("\"{}\"", git_blob(&bytes));
            send_range(&mut stream, &request, &bytes, &[("ETag", etag), commit()])
        }
        Some(Found::Large(bytes)) => {
            let digest = sha256(&bytes);
            // Another host name, as for the Hub's storage: credentials must not be sent there.
            let port = stream.local_addr().ok()?.port();
            let storage = storage.unwrap_or_else(|| format!("http://localhost:{port}"));
            let headers = [
                ("Location", format!("{storage}/storage/{digest}")),
                ("X-Linked-Etag", format!("\"{digest}\"")),
                ("X-Linked-Size", bytes.len().to_string()),
                commit(),
            ];
            send(&mut stream, "302 Found", &headers, b"")
        }
        None => send(&mut stream, "404 Not Found", &[], b""),
    }
}

enum Found {
    Listing(String),
    Small(Vec<u8>),
    Large(Vec<u8>),
}

/// `api/{datasets,models}/ID/revision/REV`, `datasets/ID/resolve/REV/FILE`, `ID/resolve/REV/FILE`.
fn route(repos: &Repos, path: &str) -> Option<Found> {
    let known = |revision: &str| [COMMIT, "main", "v1"].contains(&revision);
    if let Some(path) = path.strip_prefix("api/") {
        let (repo, revision) = path.split_once("/revision/")?;
        let files = repos.get(repo).filter(|_| known(revision))?;
        let siblings: Vec<_> =
            files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        return Some(Found::Listing(
            serde_json::json!({ "id": repo, "sha": COMMIT, "siblings": siblings }).to_string(),
        ));
    }
    let (repo, rest) = path.split_once("/resolve/")?;
    let (revision, file) = rest.split_once('/')?;
    let files = repos.get(repo).or_else(|| repos.get(&format!("models/{repo}")))?;
    let bytes = files.get(file).filter(|_| known(revision))?.clone();
    Some(if bytes.len() > LARGE { Found::Large(bytes) } else { Found::Small(bytes) })
}

fn commit() -> (&'static str, String) {
    ("X-Repo-Commit", COMMIT.to_owned())
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn git_blob(bytes: &[u8]) -> String {
    let header = format!("blob {}\0", bytes.len());
    hexadecimal(&Sha1::new_with_prefix(header).chain_update(bytes).finalize())
}

fn send_faulty(
    stream: &mut TcpStream,
    request: &Request,
    mut contents: Vec<u8>,
    fault: Fault,
    transfer: usize,
) -> Option<()> {
    let middle = contents.len() / 2;
    match fault {
        Fault::Corrupt(times) if transfer <= times => contents[middle] ^= 1,
        Fault::Status(status, times) if transfer <= times => {
            return send(stream, &format!("{status} Fault"), &[], b"");
        }
        Fault::IgnoreRange(times) => {
            let whole = Request { path: String::new(), range: None, authorization: None };
            let sent = if transfer <= times { middle } else { contents.len() };
            return send_part(stream, &whole, &contents, sent, false);
        }
        Fault::Encoded => {
            let encoding = ("Content-Encoding", "gzip".to_owned());
            return send_range(stream, request, &contents, &[encoding]);
        }
        Fault::Ring => {
            let digest = sha256(&contents);
            let location = ("Location", format!("/storage/{digest}"));
            return send(stream, "302 Found", &[location], b"");
        }
        Fault::Endless => {
            contents.resize(contents.len() + (4 << 20), 0);
            return send(stream, "200 OK", &[], &contents);
        }
        Fault::DropEvery(bytes) => return send_part(stream, request, &contents, bytes, false),
        Fault::Stall(times) if transfer <= times => {
            return send_part(stream, request, &contents, middle, true);
        }
        _ => {}
    }
    send_range(stream, request, &contents, &[])
}

/// Announces the requested range, and closes or stalls the connection after `bytes` bytes.
fn send_part(
    stream: &mut TcpStream,
    request: &Request,
    contents: &[u8],
    bytes: usize,
    stalls: bool,
) -> Option<()> {
    let (head, body) = response(request, contents, &[]);
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body[..bytes.min(body.len())]).ok()?;
    if stalls {
        // Waits until the client disconnects, or for so long that a missing timeout is noticed.
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        let _ = stream.read(&mut [0]);
    }
    Some(())
}

fn send_range(
    stream: &mut TcpStream,
    request: &Request,
    contents: &[u8],
    headers: &[(&str, String)],
) -> Option<()> {
    let (head, body) = response(request, contents, headers);
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(body).ok()
}

fn response<'c>(
    request: &Request,
    contents: &'c [u8],
    headers: &[(&str, String)],
) -> (String, &'c [u8]) {
    let total = contents.len();
    match request.range {
        None => (head("200 OK", total, headers), contents),
        Some((from, _)) if from >= total => (head("416 Range Not Satisfiable", 0, headers), &[]),
        Some((from, to)) => {
            let end = to.map_or(total, |to| (to + 1).min(total));
            let range = ("Content-Range", format!("bytes {from}-{}/{total}", end - 1));
            let headers = [headers, &[range]].concat();
            (head("206 Partial Content", end - from, &headers), &contents[from..end])
        }
    }
}

fn send(
    stream: &mut TcpStream,
    status: &str,
    headers: &[(&str, String)],
    body: &[u8],
) -> Option<()> {
    stream.write_all(head(status, body.len(), headers).as_bytes()).ok()?;
    stream.write_all(body).ok()
}

fn head(status: &str, length: usize, headers: &[(&str, String)]) -> String {
    let headers: String =
        headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n")
}
