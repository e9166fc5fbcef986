//! Downloads that end in a verified file or in none.
//!
//! The `hf-hub` crate knows the Hub's addresses and the layout of its cache; its own downloads,
//! though, wait for ever on a stalled connection, take up a broken one without asking whether the
//! server did, and never compare contents with their hash. So [`Downloader`] transfers files with
//! the same HTTP client: it resumes where a connection was lost, as long as each one brings
//! something, gives up a stalled one, and moves a file to its place only when its hash is the one
//! that the Hub announced.
//!
//! A server is not trusted. At most the announced size is written, and at most [`LISTING`] bytes of a
//! description are read. The token goes to the scheme, host and port of the endpoint alone. A failed
//! part is removed, unless only the connection was lost: then the next run resumes it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use hf_hub::api::Progress;
use indicatif::ProgressBar;
use ureq::http::Response;
use ureq::{Agent, Body, Timeout};

use crate::hub::content_hash::ContentHash;
use crate::{DataError, HubToken};

/// When to give up on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// How long a connection may bring nothing.
    pub stall: Duration,
    /// Attempts in a row that may bring nothing.
    pub attempts: u32,
    /// Wait after the first of those; each further one doubles it.
    pub pause: Duration,
}

impl Default for Patience {
    /// Half a minute without a byte, six times over, with a quarter of a minute of waits.
    fn default() -> Self {
        let (stall, pause) = (Duration::from_secs(30), Duration::from_millis(500));
        Self { stall, attempts: 6, pause }
    }
}

/// A file as the Hub announces it.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    pub(crate) url: String,
    pub(crate) hash: ContentHash,
    pub(crate) bytes: u64,
}

/// Why a request brought nothing, or not everything.
#[derive(Debug)]
enum Failure {
    /// No connection came about.
    Absent(String),
    /// Trying again may help.
    Lost(String),
    /// The server will say the same again.
    Refused(DataError),
}

/// Fetches files of one endpoint.
#[derive(Debug)]
pub(crate) struct Downloader {
    agent: Agent,
    token: Option<HubToken>,
    patience: Patience,
    shows_progress: bool,
}

/// How long a connection may take to come about, at most.
const CONNECT: Duration = Duration::from_secs(10);

/// Attempts to reach a server that has not answered yet: without a network, nobody wants to wait.
const FIRST_ATTEMPTS: u32 = 2;

/// Bytes that the description of a repository may have: hundreds for each of 100,000 files.
const LISTING: u64 = 32 << 20;

/// Stalls that reading a description may take in all, so that no server can let it trickle for ever.
const LISTING_STALLS: u32 = 10;

/// Redirects that are followed.
const MAX_REDIRECTS: usize = 5;

impl Downloader {
    pub(crate) fn new(token: Option<HubToken>, patience: Patience, shows_progress: bool) -> Self {
        let config = Agent::config_builder()
            .timeout_connect(Some(patience.stall.min(CONNECT)))
            .timeout_recv_response(Some(patience.stall))
            .timeout_per_read(Some(patience.stall))
            .http_status_as_error(false)
            // Compressed bytes could be neither resumed nor compared with their hash.
            .accept_encoding("identity")
            // Followed here, where it is decided who sees the token.
            .max_redirects(0)
            .build();
        Self { agent: config.into(), token, patience, shows_progress }
    }

    /// The body of the JSON document at `url`.
    ///
    /// # Errors
    /// [`DataError::Unreachable`] where the server does not answer, [`DataError::Hub`] where it
    /// refuses to.
    pub(crate) fn document(&self, url: &str) -> Result<String, DataError> {
        self.insist(url, || {
            let wrong =
                |reason: String| Failure::Refused(DataError::Hub { url: url.to_owned(), reason });
            let response = self.get(url, 0)?;
            let (mut document, started) = (Vec::new(), Instant::now());
            let mut body = response.into_body().into_reader();
            let mut buffer = vec![0; 1 << 16];
            loop {
                match body.read(&mut buffer).map_err(|error| broken(url, error))? {
                    0 => break,
                    read => document.extend_from_slice(&buffer[..read]),
                }
                if document.len() as u64 > LISTING {
                    return Err(wrong(format!("its description has more than {LISTING} bytes")));
                }
                if started.elapsed() > self.patience.stall * LISTING_STALLS {
                    return Err(wrong("its description takes too long".to_owned()));
                }
            }
            String::from_utf8(document).map_err(|_| wrong("its description is not UTF-8".into()))
        })
    }

    /// What the Hub announces about the file at `url`: the hash and size of its contents, which a
    /// storage service may hold elsewhere.
    ///
    /// # Errors
    /// Those of [`Downloader::document`]; also where the server names no hash.
    pub(crate) fn announced(&self, url: &str) -> Result<RemoteFile, DataError> {
        let response = self.insist(url, || {
            let mut at = url.to_owned();
            for _ in 0..=MAX_REDIRECTS {
                let response = self.get_once(&at, self.token_for(url, &at), Some((0, Some(0))))?;
                // A storage service knows nothing of what the Hub announces.
                let same = |to: &String| origin(to) == origin(url);
                match redirect(&response, &at)?.filter(same) {
                    Some(to) => at = to,
                    None => return Ok(response),
                }
            }
            Err(too_many_redirects(url))
        })?;
        let etag = header(&response, "x-linked-etag").or_else(|| header(&response, "etag"));
        let hash = etag.and_then(ContentHash::parse).ok_or_else(|| DataError::Hub {
            url: url.to_owned(),
            reason: format!("no hash of its contents is announced (etag {etag:?})"),
        })?;
        let range = header(&response, "content-range");
        let total = range.and_then(|range| range.split('/').next_back());
        // Where ranges are not understood, the answer is the whole file.
        let whole = header(&response, "content-length").filter(|_| response.status() == 200);
        let bytes = header(&response, "x-linked-size").or(total).or(whole);
        let bytes = bytes.and_then(|bytes| bytes.parse().ok()).ok_or_else(|| DataError::Hub {
            url: url.to_owned(),
            reason: "the size of its contents is not announced".to_owned(),
        })?;
        Ok(RemoteFile { url: url.to_owned(), hash, bytes })
    }

    /// Brings `file` to `blob`, where it appears complete and verified or not at all. What an
    /// interrupted download has left beside it is taken up.
    ///
    /// # Errors
    /// Those of [`Downloader::document`], [`DataError::Corrupted`] where what the server sends is
    /// not what it announced, [`DataError::Unwritable`].
    pub(crate) fn fetch(&self, file: &RemoteFile, blob: &Path) -> Result<(), DataError> {
        let part = blob.with_extension("part");
        self.fetch_verified(file, blob, &part).inspect_err(|error| {
            let lost = matches!(error, DataError::Unreachable { .. });
            let resumable = lost && fs::metadata(&part).is_ok_and(|part| part.len() > 0);
            if !resumable {
                // The error that matters is the one being returned.
                let _ = fs::remove_file(&part);
            }
        })
    }

    fn fetch_verified(&self, file: &RemoteFile, blob: &Path, part: &Path) -> Result<(), DataError> {
        // Contents may have been damaged on the way, or by whoever left a part behind: once more.
        let Some(found) = self.try_fetch(file, part, blob)? else { return Ok(()) };
        tracing::warn!(url = file.url, %found, announced = %file.hash, "damaged; fetching again");
        let Some(found) = self.try_fetch(file, part, blob)? else { return Ok(()) };
        let (url, expected) = (file.url.clone(), file.hash.to_string());
        Err(DataError::Corrupted { url, expected, found: found.to_string() })
    }

    /// The hash of contents that are not those of `file`; they are gone.
    fn try_fetch(
        &self,
        file: &RemoteFile,
        part: &Path,
        blob: &Path,
    ) -> Result<Option<ContentHash>, DataError> {
        self.transfer(file, part)?;
        let found = file.hash.of_same_kind(part).map_err(DataError::unreadable(part))?;
        if found != file.hash {
            fs::remove_file(part).map_err(DataError::unwritable(part))?;
            return Ok(Some(found));
        }
        let place = || {
            File::open(part)?.sync_all()?;
            fs::rename(part, blob)
        };
        place().map_err(DataError::unwritable(blob))?;
        Ok(None)
    }

    /// Fills `part` up to the size of `file`.
    fn transfer(&self, file: &RemoteFile, part: &Path) -> Result<(), DataError> {
        let mut out = OpenOptions::new()
            .create(true)
            .append(true)
            .open(part)
            .map_err(DataError::unwritable(part))?;
        let mut bar = match self.shows_progress {
            true => ProgressBar::new(0),
            false => ProgressBar::hidden(),
        };
        let name = file.url.rsplit('/').next().unwrap_or_default();
        bar.init(file.bytes as usize, name);
        let mut failures = 0;
        let mut reached = 0;
        loop {
            let (attempts, failure) = match self.resume(file, part, &mut out, &bar) {
                Ok(()) => break,
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Absent(reason)) if reached == 0 => (FIRST_ATTEMPTS, reason),
                Err(Failure::Lost(reason) | Failure::Absent(reason)) => {
                    (self.patience.attempts, reason)
                }
            };
            let length = length(&out, part)?;
            failures = if length > reached { 0 } else { failures + 1 };
            reached = reached.max(length);
            tracing::debug!(url = file.url, length, failure, "connection lost");
            self.wait(failures, attempts, &file.url, failure)?;
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Appends what is missing of `file`, as far as one connection brings it.
    fn resume(
        &self,
        file: &RemoteFile,
        part: &Path,
        out: &mut File,
        bar: &ProgressBar,
    ) -> Result<(), Failure> {
        let mut start = length(out, part).map_err(Failure::Refused)?;
        if start > file.bytes {
            start = truncate(out, part)?;
        }
        if file.bytes == start {
            return Ok(());
        }
        let mut response = self.get(&file.url, start)?;
        let range = header(&response, "content-range").unwrap_or_default();
        let continues = response.status() == 206 && range.starts_with(&format!("bytes {start}-"));
        if start > 0 && !continues {
            // The server sends everything anew, or something else altogether.
            start = truncate(out, part)?;
            if response.status() != 200 {
                return Err(Failure::Lost(format!("asked to go on, it sent `{range}`")));
            }
        }
        bar.set_position(start);
        // Whatever else the server sends is not what it announced.
        let mut body = response.body_mut().as_reader().take(file.bytes - start);
        let mut buffer = vec![0; 1 << 16];
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) => return Err(broken(&file.url, error)),
            };
            out.write_all(&buffer[..read])
                .map_err(|cause| Failure::Refused(DataError::unwritable(part)(cause)))?;
            bar.inc(read as u64);
        }
        match length(out, part).map_err(Failure::Refused)? < file.bytes {
            true => Err(Failure::Lost("it ended early".to_owned())),
            false => Ok(()),
        }
    }

    /// Tries until it works, or until the patience is at its end.
    fn insist<T>(
        &self,
        url: &str,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, DataError> {
        let mut failures = 0;
        loop {
            let (attempts, reason) = match attempt() {
                Ok(done) => return Ok(done),
                Err(Failure::Refused(error)) => return Err(error),
                Err(Failure::Lost(reason)) => (self.patience.attempts, reason),
                Err(Failure::Absent(reason)) => (FIRST_ATTEMPTS, reason),
            };
            failures += 1;
            self.wait(failures, attempts, url, reason)?;
        }
    }

    /// Waits before another attempt, if there is to be one.
    fn wait(
        &self,
        failures: u32,
        attempts: u32,
        url: &str,
        reason: String,
    ) -> Result<(), DataError> {
        if failures >= attempts {
            return Err(DataError::Unreachable { url: url.to_owned(), reason });
        }
        if failures > 0 {
            // The exponent is below the number of attempts; a wait beyond a minute helps nobody.
            let pause = self.patience.pause.saturating_mul(1 << (failures - 1).min(16));
            thread::sleep(pause.min(Duration::from_secs(60)));
        }
        Ok(())
    }

    /// The response to a request for `url` from byte `from` on, wherever redirects lead.
    fn get(&self, url: &str, from: u64) -> Result<Response<Body>, Failure> {
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let range = (from > 0).then_some((from, None));
            let response = self.get_once(&at, self.token_for(url, &at), range)?;
            match redirect(&response, &at)? {
                Some(to) => at = to,
                None => return Ok(response),
            }
        }
        Err(too_many_redirects(url))
    }

    /// The token, where `at` is at the scheme, host and port of `url`, which the user has named.
    fn token_for(&self, url: &str, at: &str) -> Option<&HubToken> {
        self.token.as_ref().filter(|_| origin(at) == origin(url))
    }

    /// The response to one request, which may be a redirect, for a range of bytes of `url`.
    fn get_once(
        &self,
        url: &str,
        token: Option<&HubToken>,
        range: Option<(u64, Option<u64>)>,
    ) -> Result<Response<Body>, Failure> {
        let mut request = self.agent.get(url);
        if let Some(token) = token {
            request = request.header("Authorization", token.bearer());
        }
        if let Some((from, to)) = range {
            let to = to.map(|to| to.to_string()).unwrap_or_default();
            request = request.header("Range", format!("bytes={from}-{to}"));
        }
        let response = request.call().map_err(|error| failed(url, error))?;
        check_encoding(url, &response)?;
        let status = response.status();
        match status.as_u16() {
            200..400 => Ok(response),
            // A part that is longer than the file: the caller starts anew. Without a part it is a refusal.
            416 if range.is_some() => Ok(response),
            // Other methods, versions or networks are what the last ones would need.
            408 | 429 | 500 | 502..=504 | 506..=510 | 520.. => {
                Err(Failure::Lost(format!("answered {status}")))
            }
            _ => Err(Failure::Refused(refused(url, status.as_u16()))),
        }
    }
}

/// Refuses encoded contents, because no encoding was requested. The client decodes gzip on its own and removes
/// the encoding and the length from the headers, so contents without a length and without chunks count as encoded.
fn check_encoding(url: &str, response: &Response<Body>) -> Result<(), Failure> {
    let encoding = header(response, "content-encoding").filter(|name| *name != "identity");
    if let Some(encoding) = encoding {
        return Err(encoded(url, &encoding.escape_debug().to_string()));
    }
    let has = |name| response.headers().contains_key(name);
    let has_body = matches!(response.status().as_u16(), 200 | 206);
    match has_body && !has("content-length") && !has("transfer-encoding") {
        true => Err(encoded(url, "gzip, or a body without Content-Length")),
        false => Ok(()),
    }
}

fn encoded(url: &str, encoding: &str) -> Failure {
    refused_by(url, format!("it sends the content encoding {encoding}, which was not asked for"))
}

/// What a body failed by.
fn broken(url: &str, error: io::Error) -> Failure {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<ureq::Error>());
    match cause {
        Some(ureq::Error::Decompress(encoding, _)) => encoded(url, encoding),
        _ => lost(error),
    }
}

/// Where `response`, the answer to a request for `at`, redirects to.
fn redirect(response: &Response<Body>, at: &str) -> Result<Option<String>, Failure> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let refused = |reason: String| refused_by(at, reason);
    let to = header(response, "location").unwrap_or_default();
    let to = match to {
        _ if to.starts_with("https://") || to.starts_with("http://") => to.to_owned(),
        _ if to.starts_with('/') && !to.starts_with("//") => format!("{}{to}", origin(at)),
        _ => return Err(refused(format!("it redirects to `{}`", to.escape_debug()))),
    };
    match at.starts_with("https://") && !to.starts_with("https://") {
        true => Err(refused("it redirects to an address without TLS".to_owned())),
        false => Ok(Some(to)),
    }
}

fn too_many_redirects(url: &str) -> Failure {
    refused_by(url, format!("it redirects more than {MAX_REDIRECTS} times"))
}

fn refused(url: &str, status: u16) -> DataError {
    let reason = match status {
        401 | 403 => {
            "access is refused: for a private or gated repository set HF_TOKEN to a token that may read it, otherwise check the id"
        }
        404 => "there is no such repository, revision or file",
        _ => "the server refuses the request",
    };
    DataError::Hub { url: url.to_owned(), reason: format!("{reason} (status {status})") }
}

/// What a request failed by.
fn failed(url: &str, error: ureq::Error) -> Failure {
    let reason = error.to_string();
    match error {
        ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => Failure::Absent(reason),
        ureq::Error::Io(error) => match error.kind() {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::TimedOut
            | io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted => Failure::Lost(reason),
            // TLS speaks through errors of this kind: a certificate will not change.
            io::ErrorKind::InvalidData => refused_by(url, reason),
            // No route, a refused connection, a name that the resolver does not know.
            _ => Failure::Absent(reason),
        },
        ureq::Error::Timeout(_) | ureq::Error::Protocol(_) => Failure::Lost(reason),
        _ => refused_by(url, reason),
    }
}

fn refused_by(url: &str, reason: String) -> Failure {
    Failure::Refused(DataError::Hub { url: url.to_owned(), reason })
}

fn lost(error: impl std::fmt::Display) -> Failure {
    Failure::Lost(error.to_string())
}

fn length(file: &File, path: &Path) -> Result<u64, DataError> {
    file.metadata().map(|metadata| metadata.len()).map_err(DataError::unreadable(path))
}

/// Empties a part. A file opened to append writes at its new end.
fn truncate(file: &File, path: &Path) -> Result<u64, Failure> {
    let emptied: io::Result<()> = file.set_len(0);
    emptied.map_err(|cause| Failure::Refused(DataError::unwritable(path)(cause)))?;
    Ok(0)
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Scheme, host and port of `url`, as written: another spelling counts as another origin.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    &url[..url[host..].find(['/', '?', '#', '\\']).map_or(url.len(), |at| host + at)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_ends_before_the_path() {
        assert_eq!(origin("http://127.0.0.1:80/a/b"), "http://127.0.0.1:80");
        assert_eq!(origin("https://host"), "https://host");
        assert_eq!(origin("https://host?@b/c"), "https://host");
        assert_eq!(origin("https://host@b/c"), "https://host@b");
    }

    #[test]
    fn a_server_that_is_not_there_is_named() {
        let patience =
            Patience { stall: Duration::from_secs(5), attempts: 2, pause: Duration::ZERO };
        let downloader = Downloader::new(None, patience, false);
        // Port 9 discards; on a machine where something listens there, it is no web server.
        let message = downloader.document("http://127.0.0.1:9/x").unwrap_err().to_string();
        assert!(message.contains("`http://127.0.0.1:9/x`"), "{message}");
        assert!(message.contains("HF_ENDPOINT"), "{message}");
    }
}
