//! Downloads whose result is a verified file or no file.
//!
//! [`Downloader`] resumes a transfer when a connection is lost, retries as long as each connection
//! makes progress, gives up a stalled connection, and moves a file into place only if its hash is
//! the one that the Hub announced. The `hf-hub` crate (1.0.0) does none of these, so it is not
//! used: it does not resume a lost transfer, waits indefinitely on a stalled connection, accepts
//! contents that differ from the announced hash, and stores the body of an error response as the
//! file.
//!
//! The server is not trusted. At most the announced size is written, and at most [`LISTING_BYTES`]
//! of a listing are read. The token is sent only to the scheme, host and port of the endpoint. A
//! partial file is removed unless only the connection was lost, in which case the next run resumes
//! it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ureq::http::Response;
use ureq::{Agent, Body, Timeout};

use crate::hub::content_hash::ContentHash;
use crate::{DataError, HubToken, Result};

/// How long and how often a request is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Maximum time that a connection may receive no byte.
    pub stall_timeout: Duration,
    /// Maximum number of consecutive attempts without progress.
    pub attempts: u32,
    /// The pause after the first failed attempt. It doubles after each further failure.
    pub pause: Duration,
}

impl Default for RetryPolicy {
    /// Six attempts with a stall timeout of 30 seconds, and with pauses of about 15 seconds in
    /// total.
    fn default() -> Self {
        let (stall_timeout, pause) = (Duration::from_secs(30), Duration::from_millis(500));
        Self { stall_timeout, attempts: 6, pause }
    }
}

/// A file, as announced by the Hub.
#[derive(Debug)]
pub(crate) struct RemoteFile {
    /// The address on the Hub, which may redirect to a storage server.
    pub(crate) url: String,
    /// The announced hash of the contents.
    pub(crate) hash: ContentHash,
    /// The announced size.
    pub(crate) bytes: u64,
}

/// The reason why a request failed or ended early.
#[derive(Debug)]
enum RequestError {
    /// No connection was established.
    NoConnection(String),
    /// Another attempt may succeed.
    Retryable(String),
    /// Another attempt would fail in the same way.
    Fatal(DataError),
}

impl RequestError {
    /// Returns the error of a request that the server at `url` rejected, or of an invalid response.
    fn refused(url: &str, reason: impl Into<String>) -> Self {
        Self::Fatal(DataError::Hub { url: url.to_owned(), reason: reason.into() })
    }
}

/// Counts failed attempts and waits between them.
struct Attempts<'a> {
    /// How long and how often a request is retried.
    policy: &'a RetryPolicy,
    /// The address, for errors.
    url: &'a str,
    /// Consecutive attempts without progress.
    failures: u32,
    /// Whether the server has sent contents before.
    has_answered: bool,
}

impl<'a> Attempts<'a> {
    /// The state before the first attempt.
    fn new(policy: &'a RetryPolicy, url: &'a str) -> Self {
        Self { policy, url, failures: 0, has_answered: false }
    }

    /// Records progress, which resets the number of failures.
    fn progressed(&mut self) {
        (self.failures, self.has_answered) = (0, true);
    }

    /// Waits before the next attempt, or returns the error if no attempt is left.
    fn wait_after(&mut self, error: RequestError) -> Result<()> {
        let (attempts, reason) = match error {
            RequestError::Fatal(error) => return Err(error),
            RequestError::NoConnection(reason) if !self.has_answered => (FIRST_ATTEMPTS, reason),
            RequestError::NoConnection(reason) | RequestError::Retryable(reason) => {
                (self.policy.attempts, reason)
            }
        };
        tracing::debug!(url = self.url, reason, "connection lost");
        self.failures += 1;
        if self.failures >= attempts {
            return Err(DataError::Unreachable { url: self.url.to_owned(), reason });
        }
        // The exponent is bounded to avoid an overflow, and the pause is limited to one minute.
        let pause = self.policy.pause.saturating_mul(1 << (self.failures - 1).min(16));
        thread::sleep(pause.min(Duration::from_secs(60)));
        Ok(())
    }
}

/// Downloads files of one endpoint.
#[derive(Debug)]
pub(crate) struct Downloader {
    /// The HTTP client, with the timeouts of the policy.
    agent: Agent,
    /// The access token, which is sent only to the endpoint.
    token: Option<HubToken>,
    /// How long and how often a request is retried.
    policy: RetryPolicy,
    /// Whether a progress bar is drawn on a terminal.
    shows_progress: bool,
}

/// Maximum time to establish a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Attempts to connect to a server that has not answered yet. The number is small, so that a run
/// without a network does not wait long.
const FIRST_ATTEMPTS: u32 = 2;

/// Maximum bytes of a repository's listing: more than 300 bytes for each of 100,000 files.
const LISTING_BYTES: u64 = 32 << 20;

/// Maximum time for a listing in multiples of the stall timeout, so that a server cannot send it
/// byte by byte.
const LISTING_STALLS: u32 = 10;

/// Maximum number of redirects.
const MAX_REDIRECTS: usize = 5;

/// A range of bytes, with or without an end.
type ByteRange = (u64, Option<u64>);

/// The redirects that a request follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Redirects {
    /// All redirects, up to the contents.
    ToContents,
    /// Redirects within the Hub, for example to a renamed repository, up to the response that
    /// announces hash and size. A storage server does not send these headers, and a mirror may be
    /// its own storage server.
    ToAnnouncement,
}

/// The header with the hash of contents on a storage server.
const LINKED_ETAG: &str = "x-linked-etag";

impl Downloader {
    /// Creates a client, without connecting.
    pub(crate) fn new(token: Option<HubToken>, policy: RetryPolicy, shows_progress: bool) -> Self {
        let config = Agent::config_builder()
            .timeout_connect(Some(policy.stall_timeout.min(CONNECT_TIMEOUT)))
            .timeout_recv_response(Some(policy.stall_timeout))
            .timeout_per_read(Some(policy.stall_timeout))
            .http_status_as_error(false)
            // A compressed transfer could neither be resumed nor verified by the announced hash.
            .accept_encoding("identity")
            // `get` follows redirects, because it must decide which servers receive the token.
            .max_redirects(0)
            .build();
        Self { agent: config.into(), token, policy, shows_progress }
    }

    /// Returns the body of the JSON document at `url`.
    ///
    /// # Errors
    /// Returns [`DataError::Unreachable`] if the server does not respond, and [`DataError::Hub`] if
    /// it rejects the request.
    pub(crate) fn document(&self, url: &str) -> Result<String> {
        self.retry(url, || {
            let refused = |reason: &str| RequestError::refused(url, reason);
            let (mut document, started) = (Vec::new(), Instant::now());
            let body = self.get(url, None, Redirects::ToContents)?.into_body().into_reader();
            read_body(body, |bytes| {
                document.extend_from_slice(bytes);
                if document.len() as u64 > LISTING_BYTES {
                    return Err(refused(&format!("the listing exceeds {LISTING_BYTES} bytes")));
                }
                match started.elapsed() > self.policy.stall_timeout * LISTING_STALLS {
                    true => Err(refused("the listing takes too long")),
                    false => Ok(()),
                }
            })?;
            String::from_utf8(document).map_err(|_| refused("the listing is not UTF-8"))
        })
    }

    /// Returns the hash and size that the Hub announces for the file at `url`. The contents may be
    /// on a storage server.
    ///
    /// # Errors
    /// Returns the errors of [`Downloader::document`], and an error if the server does not announce
    /// a hash or a size.
    pub(crate) fn announced(&self, url: &str) -> Result<RemoteFile> {
        // One byte only, because a server without a redirect would send the contents.
        let first_byte = Some((0, Some(0)));
        let response = self.retry(url, || self.get(url, first_byte, Redirects::ToAnnouncement))?;
        let refused = |reason: String| DataError::Hub { url: url.to_owned(), reason };
        let etag = header(&response, LINKED_ETAG).or_else(|| header(&response, "etag"));
        let hash = etag.and_then(ContentHash::parse).ok_or_else(|| {
            refused(format!("it announces no hash of the contents (etag {etag:?})"))
        })?;
        let range = header(&response, "content-range");
        let total = range.and_then(|range| range.split('/').next_back());
        // A server that does not support ranges sends the whole file.
        let whole = header(&response, "content-length").filter(|_| response.status() == 200);
        let bytes = header(&response, "x-linked-size").or(total).or(whole);
        let bytes = bytes.and_then(|bytes| bytes.parse().ok());
        let bytes =
            bytes.ok_or_else(|| refused("it announces no size of the contents".to_owned()))?;
        Ok(RemoteFile { url: url.to_owned(), hash, bytes })
    }

    /// Downloads `file` to `blob`, which is created only after the contents are complete and
    /// verified. A partial download next to it is resumed.
    ///
    /// # Errors
    /// Returns the errors of [`Downloader::document`], [`DataError::Corrupted`] if the contents
    /// differ from the announced hash, and [`DataError::Unwritable`] if the file cannot be written.
    pub(crate) fn fetch(&self, file: &RemoteFile, blob: &Path) -> Result<()> {
        let part = blob.with_extension("part");
        self.fetch_verified(file, blob, &part).inspect_err(|error| {
            let lost = matches!(error, DataError::Unreachable { .. });
            let resumable = lost && fs::metadata(&part).is_ok_and(|part| part.len() > 0);
            if !resumable {
                // The error of the download is more useful than an error of the cleanup.
                let _ = fs::remove_file(&part);
            }
        })
    }

    /// Downloads to `part`, checks the hash and moves the file to `blob`.
    fn fetch_verified(&self, file: &RemoteFile, blob: &Path, part: &Path) -> Result<()> {
        let mut damaged = String::new();
        // Two attempts, because the contents may have been damaged in transfer or in the partial
        // file of an earlier run.
        for _ in 0..2 {
            self.transfer(file, part)?;
            let found = file.hash.of_same_kind(part).map_err(DataError::unreadable(part))?;
            if found == file.hash {
                let place = || {
                    // The contents reach the disk before the name, so that a power failure leaves
                    // no empty blob.
                    File::open(part)?.sync_all()?;
                    fs::rename(part, blob)
                };
                return place().map_err(DataError::unwritable(blob));
            }
            tracing::warn!(url = file.url, %found, announced = %file.hash, "damaged download");
            fs::remove_file(part).map_err(DataError::unwritable(part))?;
            damaged = found.to_string();
        }
        let (url, expected) = (file.url.clone(), file.hash.to_string());
        Err(DataError::Corrupted { url, expected, found: damaged })
    }

    /// Downloads into `part` until it has the size of `file`.
    fn transfer(&self, file: &RemoteFile, part: &Path) -> Result<()> {
        let options = OpenOptions::new().create(true).append(true).open(part);
        let mut out = options.map_err(DataError::unwritable(part))?;
        let bar = self.progress_bar(file);
        let mut attempts = Attempts::new(&self.policy, &file.url);
        let mut reached = length(&out, part)?;
        while let Err(error) = self.resume(file, part, &mut out, &bar) {
            let length = length(&out, part)?;
            // A connection that delivered bytes has not failed, however often it is lost.
            if length > reached {
                attempts.progressed();
                reached = length;
            }
            attempts.wait_after(error)?;
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// Appends the missing bytes of `file`, as many as one connection delivers.
    fn resume(
        &self,
        file: &RemoteFile,
        part: &Path,
        out: &mut File,
        bar: &ProgressBar,
    ) -> Result<(), RequestError> {
        let unwritable = |cause| RequestError::Fatal(DataError::unwritable(part)(cause));
        let mut start = length(out, part).map_err(RequestError::Fatal)?;
        if start > file.bytes {
            // A file that is opened for appending continues at its new end.
            out.set_len(0).map_err(unwritable)?;
            start = 0;
        }
        if file.bytes == start {
            return Ok(());
        }
        let from = (start > 0).then_some((start, None));
        let mut response = self.get(&file.url, from, Redirects::ToContents)?;
        let range = header(&response, "content-range").unwrap_or_default();
        let continues = response.status() == 206 && range.starts_with(&format!("bytes {start}-"));
        if start > 0 && !continues {
            // The server sends the whole file again, or another range.
            out.set_len(0).map_err(unwritable)?;
            if response.status() != 200 {
                let reason = format!("asked for the bytes from {start}, it sent `{range}`");
                return Err(RequestError::Retryable(reason));
            }
            start = 0;
        }
        bar.set_position(start);
        // Limited to the announced size, even if the server sends more.
        let body = response.body_mut().as_reader().take(file.bytes - start);
        read_body(body, |bytes| {
            bar.inc(bytes.len() as u64);
            out.write_all(bytes).map_err(unwritable)
        })?;
        match length(out, part).map_err(RequestError::Fatal)? < file.bytes {
            true => Err(RequestError::Retryable("the response ended early".to_owned())),
            false => Ok(()),
        }
    }

    /// A progress bar for a terminal, with the name of the file.
    fn progress_bar(&self, file: &RemoteFile) -> ProgressBar {
        if !self.shows_progress {
            return ProgressBar::hidden();
        }
        let template =
            "{msg} [{elapsed_precise}] [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})";
        let style = ProgressStyle::with_template(template).expect("the template is valid");
        let name = file.url.rsplit('/').next().unwrap_or_default();
        ProgressBar::new(file.bytes).with_style(style).with_message(name.to_owned())
    }

    /// Repeats `attempt` until it succeeds, or until the retry policy gives up.
    fn retry<T>(
        &self,
        url: &str,
        mut attempt: impl FnMut() -> Result<T, RequestError>,
    ) -> Result<T> {
        let mut attempts = Attempts::new(&self.policy, url);
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(error) => attempts.wait_after(error)?,
            }
        }
    }

    /// Requests `url` and follows `redirects`. Returns the last response.
    fn get(
        &self,
        url: &str,
        range: Option<ByteRange>,
        redirects: Redirects,
    ) -> Result<Response<Body>, RequestError> {
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            // The user provided the token for the origin of `url` only.
            let token = self.token.as_ref().filter(|_| origin(&at) == origin(url));
            let response = self.send(&at, token, range)?;
            let to = redirect(&response, &at)?;
            let announces = header(&response, LINKED_ETAG).is_some();
            let follows = |to: &String| match redirects {
                Redirects::ToContents => true,
                Redirects::ToAnnouncement => !announces && origin(to) == origin(url),
            };
            match to.filter(follows) {
                Some(to) => at = to,
                None => return Ok(response),
            }
        }
        Err(RequestError::refused(url, format!("it redirects more than {MAX_REDIRECTS} times")))
    }

    /// Sends one request. The response may be a redirect.
    fn send(
        &self,
        url: &str,
        token: Option<&HubToken>,
        range: Option<ByteRange>,
    ) -> Result<Response<Body>, RequestError> {
        let mut request = self.agent.get(url);
        if let Some(token) = token {
            request = request.header("Authorization", token.bearer());
        }
        if let Some((from, to)) = range {
            let to = to.map(|to| to.to_string()).unwrap_or_default();
            request = request.header("Range", format!("bytes={from}-{to}"));
        }
        let response = request.call().map_err(|error| request_error(url, error))?;
        check_encoding(url, &response)?;
        let status = response.status();
        let reason = match status.as_u16() {
            200..=399 => return Ok(response),
            // The partial file is longer than the file, so the caller starts again. Without a
            // range, this status is an error.
            416 if range.is_some() => return Ok(response),
            // The other 5xx statuses ask for another method, version or network.
            408 | 429 | 500 | 502..=504 | 506..=510 | 520.. => {
                return Err(RequestError::Retryable(format!("answered {status}")));
            }
            401 | 403 => {
                "access is denied: for a private or gated repository set HF_TOKEN to a token with read access, otherwise check the id"
            }
            404 => "there is no such repository, revision or file",
            _ => "the server refuses the request",
        };
        Err(RequestError::refused(url, format!("{reason} (status {})", status.as_u16())))
    }
}

/// Reads all of `body` and passes it to `sink` in parts.
fn read_body(
    mut body: impl Read,
    mut sink: impl FnMut(&[u8]) -> Result<(), RequestError>,
) -> Result<(), RequestError> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match body.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => sink(&buffer[..read])?,
            Err(error) => return Err(RequestError::Retryable(error.to_string())),
        }
    }
}

/// Returns an error for encoded contents, because no encoding was requested. If another crate
/// enables gzip, the client decodes the contents and removes encoding and length from the headers,
/// so contents without a length and without chunks count as encoded.
fn check_encoding(url: &str, response: &Response<Body>) -> Result<(), RequestError> {
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

/// Returns the error of contents with an encoding.
fn encoded(url: &str, encoding: &str) -> RequestError {
    let reason = format!("it sends the content encoding {encoding}, which was not requested");
    RequestError::refused(url, reason)
}

/// Returns where `response`, the answer to a request for `at`, redirects to.
fn redirect(response: &Response<Body>, at: &str) -> Result<Option<String>, RequestError> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let to = header(response, "location").unwrap_or_default();
    let to = match to {
        _ if to.starts_with("https://") || to.starts_with("http://") => to.to_owned(),
        // An address that begins with `//` names another host.
        _ if to.starts_with('/') && !to.starts_with("//") => format!("{}{to}", origin(at)),
        _ => {
            let reason = format!("it redirects to the invalid address `{}`", to.escape_debug());
            return Err(RequestError::refused(at, reason));
        }
    };
    match at.starts_with("https://") && !to.starts_with("https://") {
        true => Err(RequestError::refused(at, "it redirects to an address without TLS")),
        false => Ok(Some(to)),
    }
}

/// Classifies the error of a request.
fn request_error(url: &str, error: ureq::Error) -> RequestError {
    let reason = error.to_string();
    match error {
        ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
            RequestError::NoConnection(reason)
        }
        ureq::Error::Io(error) => match error.kind() {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::TimedOut
            | io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted => RequestError::Retryable(reason),
            // TLS errors have this kind. A retry does not help, because the certificate stays the
            // same.
            io::ErrorKind::InvalidData => RequestError::refused(url, reason),
            // No route, a refused connection, or a name that the resolver does not know.
            _ => RequestError::NoConnection(reason),
        },
        ureq::Error::Timeout(_) | ureq::Error::Protocol(_) => RequestError::Retryable(reason),
        _ => RequestError::refused(url, reason),
    }
}

/// Returns the current size of a file that is being written.
fn length(file: &File, path: &Path) -> Result<u64> {
    file.metadata().map(|metadata| metadata.len()).map_err(DataError::unreadable(path))
}

/// Returns a header of a response if it is text.
fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// Returns the scheme, host and port of `url` as written. A different spelling counts as a
/// different origin.
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
        let policy = RetryPolicy {
            stall_timeout: Duration::from_secs(5),
            attempts: 2,
            pause: Duration::ZERO,
        };
        let downloader = Downloader::new(None, policy, false);
        // Port 9 is the discard protocol: if a server listens there, it is not a web server.
        let message = downloader.document("http://127.0.0.1:9/x").unwrap_err().to_string();
        assert!(message.contains("`http://127.0.0.1:9/x`"), "{message}");
        assert!(message.contains("HF_ENDPOINT"), "{message}");
    }
}
