//! Requests to the server of models, with bounds on all that it answers.

use super::{Hub, HubName, plain_name};
use halcyon::ir::error::{Error, Result};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use ureq::http::Response;
use ureq::tls::{PemItem, RootCerts, TlsConfig};
use ureq::{Agent, Body};

/// The most bytes of a list of files.
const MAX_LISTING: u64 = 32 << 20;
/// The most bytes of a file of certificates.
const MAX_CERTIFICATES: u64 = 16 << 20;
/// The most servers that send a request on to the next one.
const MAX_REDIRECTS: usize = 8;
/// Without an answer for this time, a connection counts as broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to the server of a repository.
pub(super) struct Client<'a> {
    agent: Agent,
    hub: &'a Hub,
    name: &'a HubName,
    endpoint: &'a str,
}

/// The files of a repository.
pub(super) struct Listing {
    pub commit: String,
    pub files: Vec<String>,
}

/// What the server says about a file.
pub(super) struct Known {
    /// Identifies the content: the SHA-256 of a large file, the hash of git of a small one.
    pub etag: String,
    pub size: u64,
}

/// The scheme and the server of a URL.
fn origin(url: &str) -> Option<&str> {
    let start = url.find("://")? + 3;
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |n| start + n);
    (start < end).then(|| &url[..end])
}

/// A text as a part of a URL's path. `keep` are further characters that stay.
fn encoded(text: &str, keep: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b) || keep.as_bytes().contains(&b);
    text.bytes().fold(String::new(), |out, b| match plain(b) {
        true => out + char::from(b).encode_utf8(&mut [0; 4]),
        false => out + &format!("%{b:02X}"),
    })
}

fn header<'r>(r: &'r Response<Body>, name: &str) -> Option<&'r str> {
    r.headers().get(name)?.to_str().ok().map(str::trim)
}

fn number(r: &Response<Body>, name: &str) -> Option<u64> {
    header(r, name)?.parse().ok()
}

/// The certificates of `SSL_CERT_FILE`, if it is set, else those of Mozilla.
fn certificates() -> Result<RootCerts> {
    let Some(file) = std::env::var_os("SSL_CERT_FILE").filter(|f| !f.is_empty()) else {
        return Ok(RootCerts::WebPki);
    };
    let bad = |what: String| {
        Error::argument("SSL_CERT_FILE", format!("{}: {what}", std::path::Path::new(&file).display()))
    };
    let mut text = Vec::new();
    let open = std::fs::File::open(&file).map_err(|e| bad(e.to_string()))?;
    open.take(MAX_CERTIFICATES).read_to_end(&mut text).map_err(|e| bad(e.to_string()))?;
    let mut all = vec![];
    for item in ureq::tls::parse_pem(&text) {
        if let PemItem::Certificate(c) = item.map_err(|e| bad(e.to_string()))? {
            all.push(c);
        }
    }
    match all.is_empty() {
        true => Err(bad("it has no certificates in PEM format".into())),
        false => Ok(RootCerts::from(all)),
    }
}

impl<'a> Client<'a> {
    pub(super) fn new(hub: &'a Hub, name: &'a HubName) -> Result<Client<'a>> {
        let endpoint = hub.endpoint.trim_end_matches('/');
        let server =
            origin(endpoint).filter(|_| ["http://", "https://"].iter().any(|s| endpoint.starts_with(s)));
        let Some(server) = server else {
            let what = format!("'{endpoint}': expected a URL such as https://huggingface.co");
            return Err(Error::argument("HF_ENDPOINT", what));
        };
        if !graviola::util::is_cpu_supported() {
            return Err(Error::unsupported(
                "downloads on this processor, which lacks instructions for TLS (AES, and AVX2 or NEON)",
                format!("Fetch the files with `hf download {}`", name.repo),
            ));
        }
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(Arc::new(rustls_graviola::default_provider()))
            .root_certs(certificates()?)
            .build();
        let mut config = Agent::config_builder()
            .tls_config(tls)
            .user_agent(concat!("halcyon/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // Redirects are followed here, because answers on the way describe the file.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE));
        let host = server.split_once("://").map_or("", |(_, h)| h);
        if ["127.0.0.1", "localhost", "[::1]"].iter().any(|l| host.starts_with(l)) {
            // A proxy does not reach this machine.
            config = config.proxy(None);
        }
        Ok(Client { agent: config.build().new_agent(), hub, name, endpoint })
    }

    /// An error about a file, or about the repository if `file` is empty.
    pub(super) fn error(&self, file: &str, what: impl std::fmt::Display) -> Error {
        let path = match file {
            "" => self.name.text(),
            f => format!("{}:{f}", self.name.text()),
        };
        Error::Io { path, what: what.to_string() }
    }

    /// What a broken connection means.
    pub(super) fn broken(&self, file: &str, why: impl std::fmt::Display) -> Error {
        let why = why.to_string();
        let next = match why.contains("certificate") {
            true => "set SSL_CERT_FILE to a file with the certificates that your network uses",
            false => "check the connection and HF_ENDPOINT; --offline uses only files in the cache",
        };
        self.error(file, format!("{}: {why}: {next}", self.endpoint))
    }

    /// What the server refused, with the next step.
    fn refused(&self, file: &str, r: &Response<Body>) -> Error {
        let status = r.status().as_u16();
        let next = match (status, header(r, "x-error-code").unwrap_or(""), &self.hub.token) {
            (_, "RepoNotFound", None) => {
                "no such repository, or a private one; check the name, or set HF_TOKEN to a token that may read it"
            }
            (404, _, _) | (_, "RepoNotFound" | "RevisionNotFound" | "EntryNotFound", _) => {
                "no such repository, revision or file; check the name"
            }
            (401 | 403, _, None) => {
                "the repository needs a token; accept its terms on its page, and set HF_TOKEN to a token of that account"
            }
            (401 | 403, _, Some(_)) => {
                "the token (HF_TOKEN) does not give access; accept the terms on the repository's page with its account"
            }
            (429, ..) => "too many requests; wait some minutes, or set HF_TOKEN",
            (500..=599, ..) => "the server has a problem; try later, or set HF_ENDPOINT to another server",
            _ => "check HF_ENDPOINT",
        };
        self.error(file, format!("{} answered with status {status}: {next}", self.endpoint))
    }

    /// Asks for a URL without following redirects. The token goes to the endpoint only.
    fn ask(&self, head: bool, url: &str, from: u64) -> std::result::Result<Response<Body>, ureq::Error> {
        let mut request = if head { self.agent.head(url) } else { self.agent.get(url) };
        request = request.header("Accept-Encoding", "identity");
        if let (Some(token), true) = (&self.hub.token, origin(url) == origin(self.endpoint)) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call()
    }

    /// The URL to which an answer redirects; `None` for another answer.
    fn redirected(&self, file: &str, url: &str, r: &Response<Body>) -> Result<Option<String>> {
        if !matches!(r.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
            return Ok(None);
        }
        let to = header(r, "location").unwrap_or("");
        let server = origin(url).unwrap_or("");
        let next = match to {
            t if t.starts_with("https://") || t.starts_with("http://") => t.to_string(),
            t if t.starts_with('/') && !t.starts_with("//") => format!("{server}{t}"),
            _ => return Err(self.error(file, "the server redirects to an address that is not a URL")),
        };
        match url.starts_with("https://") && !next.starts_with("https://") {
            true => Err(self.error(file, "the server redirects from https to http, which is not followed")),
            false => Ok(Some(next)),
        }
    }

    /// The answer after all redirects. Its status is 200 or 206.
    fn get(&self, file: &str, url: String, from: u64) -> Result<Response<Body>> {
        let mut url = url;
        for _ in 0..=MAX_REDIRECTS {
            let r = self.ask(false, &url, from).map_err(|e| self.broken(file, e))?;
            match self.redirected(file, &url, &r)? {
                Some(next) => url = next,
                None if matches!(r.status().as_u16(), 200 | 206) => return Ok(r),
                None => return Err(self.refused(file, &r)),
            }
        }
        Err(self.error(file, format!("the server redirects more than {MAX_REDIRECTS} times")))
    }

    /// The commit of the revision, and its files.
    pub(super) fn listing(&self) -> Result<Listing> {
        let revision = encoded(&self.name.revision, "");
        let url = format!("{}/api/models/{}/revision/{revision}", self.endpoint, self.name.repo);
        let mut r = self.get("", url, 0)?;
        let text = r.body_mut().with_config().limit(MAX_LISTING).read_to_vec();
        let text = text.map_err(|e| self.broken("", e))?;
        let bad = |what: &str| Error::Format {
            file: self.name.text(),
            what: format!("{} answered with {what}; check HF_ENDPOINT", self.endpoint),
        };
        let json: serde_json::Value =
            serde_json::from_slice(&text).map_err(|_| bad("something that is not JSON"))?;
        let commit = json["sha"].as_str().filter(|c| c.len() >= 7 && c.len() <= 64);
        let commit =
            commit.filter(|c| c.bytes().all(|b| b.is_ascii_hexdigit())).ok_or_else(|| bad("no commit"))?;
        let siblings = json["siblings"].as_array().ok_or_else(|| bad("no list of files"))?;
        let names = siblings.iter().filter_map(|s| s["rfilename"].as_str());
        Ok(Listing { commit: commit.into(), files: names.map(str::to_string).collect() })
    }

    fn url(&self, commit: &str, file: &str) -> String {
        format!("{}/{}/resolve/{commit}/{}", self.endpoint, self.name.repo, encoded(file, "/"))
    }

    /// Asks what a file is.
    pub(super) fn head(&self, commit: &str, file: &str) -> Result<Known> {
        let mut url = self.url(commit, file);
        for _ in 0..=MAX_REDIRECTS {
            let r = self.ask(true, &url, 0).map_err(|e| self.broken(file, e))?;
            // Of a large file, the hub itself knows the hash; the server to which it redirects does not.
            let linked = header(&r, "x-linked-etag").map(|e| (e, number(&r, "x-linked-size")));
            let next = self.redirected(file, &url, &r)?;
            let (etag, size) = match (linked, next) {
                (Some((etag, Some(size))), _) => (etag, Some(size)),
                (_, Some(next)) => {
                    url = next;
                    continue;
                }
                (_, None) if r.status() == 200 => {
                    (header(&r, "etag").unwrap_or(""), number(&r, "content-length"))
                }
                _ => return Err(self.refused(file, &r)),
            };
            let etag = etag.trim_start_matches("W/").trim_matches('"');
            // It becomes the name of a file in the cache.
            let good = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            if !plain_name(etag) || etag.starts_with('.') || etag.len() > 128 || !etag.bytes().all(good) {
                return Err(self.error(file, "the server's answer has no etag, or a malformed one"));
            }
            let size =
                size.ok_or_else(|| self.error(file, "the server does not say how long the file is"))?;
            return Ok(Known { etag: etag.into(), size });
        }
        Err(self.error(file, format!("the server redirects more than {MAX_REDIRECTS} times")))
    }

    /// The bytes of a file from one on, or all of it if the server sends no parts. Returns the position of
    /// the first byte too.
    pub(super) fn bytes(&self, commit: &str, file: &str, from: u64, size: u64) -> Result<(u64, impl Read)> {
        let r = self.get(file, self.url(commit, file), from)?;
        let (at, announced) = match r.status().as_u16() {
            200 => (0, number(&r, "content-length")),
            // bytes FIRST-LAST/SIZE
            _ => {
                let range = header(&r, "content-range").and_then(|t| t.strip_prefix("bytes "));
                let parts = range.and_then(|t| t.split_once('/'));
                let first = parts.and_then(|(r, _)| r.split_once('-')?.0.trim().parse::<u64>().ok());
                if first != Some(from) {
                    return Err(self.error(file, "the server sends another part than the one asked for"));
                }
                (from, parts.and_then(|(_, n)| n.trim().parse().ok()))
            }
        };
        match announced {
            Some(n) if n != size => {
                let what = format!("the server announced {size} bytes, and then {n}; try again");
                Err(self.error(file, what))
            }
            _ => Ok((at, r.into_body().into_with_config().limit(u64::MAX).reader())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_an_origin_and_are_encoded() {
        assert_eq!(origin("https://a.b:1/c?d"), Some("https://a.b:1"));
        assert_eq!(origin("http://a?b"), Some("http://a"));
        assert_eq!(origin("https://a@b/c"), Some("https://a@b"));
        for wrong in ["a/b", "http://", "http:///x"] {
            assert_eq!(origin(wrong), None, "{wrong}");
        }
        assert_eq!(encoded("a b/ä+~.gguf", "/"), "a%20b/%C3%A4%2B~.gguf");
        assert_eq!(encoded("refs/pr/1", ""), "refs%2Fpr%2F1");
    }
}
