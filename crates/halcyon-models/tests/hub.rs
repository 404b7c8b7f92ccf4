//! Models by name: what is in the cache is used, and with the feature `hub` the rest is downloaded from a
//! server of the test.

use halcyon::Error;
use halcyon_models::hub::{Hub, HubName};
use std::path::Path;
use tempfile::TempDir;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn name(text: &str) -> HubName {
    HubName::parse(text).expect("a name").expect("it begins with hf:")
}

fn hub(cache: &Path, endpoint: &str, offline: bool) -> Hub {
    Hub { cache: cache.into(), endpoint: endpoint.into(), token: None, offline }
}

/// A cache with a snapshot of `org/repo` with these files.
fn cache(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    let repo = dir.path().join("models--org--repo");
    let write = |path: std::path::PathBuf, text: &str| {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("it is made");
        std::fs::write(path, text).expect("it is written");
    };
    write(repo.join("refs/main"), COMMIT);
    for (file, text) in files {
        write(repo.join("snapshots").join(COMMIT).join(file), text);
    }
    dir
}

#[test]
fn names_are_read() {
    let n = name("hf:org/repo@v1/x:Q4_K_M");
    assert_eq!(
        (n.repo.as_str(), n.revision.as_str(), n.file.as_deref()),
        ("org/repo", "v1/x", Some("Q4_K_M"))
    );
    assert_eq!(name("hf:o/r").revision, "main");
    assert_eq!(HubName::parse("model.gguf").expect("a path"), None);
    for wrong in [
        "hf:",
        "hf:repo",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/..",
        "hf:a/b@../x",
        "hf:a/b:../x",
        "hf:a/b:/etc/x",
        "hf:a/b:",
        "hf:a/b:x\\y",
        "hf:a b/c",
        "hf:a/b@",
    ] {
        assert!(matches!(HubName::parse(wrong), Err(Error::Argument { .. })), "{wrong}");
    }
}

#[test]
fn files_in_the_cache_need_no_network() {
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let one = [("m-Q4_0.gguf", ""), ("README.md", "")];
    let many = [("m-Q4_0.gguf", ""), ("m-Q4_K_M.gguf", ""), ("m.IQ4_XS.gguf", ""), ("mmproj-F16.gguf", "")];
    let split = [
        ("Q8_0/m-Q8_0-00001-of-00002.gguf", ""),
        ("Q8_0/m-Q8_0-00002-of-00002.gguf", ""),
        ("m-Q2_K.gguf", ""),
    ];
    let folder = [("config.json", "{}"), ("model.safetensors", "")];
    let sharded = [
        ("config.json", "{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", ""),
        ("model-2.safetensors", ""),
    ];
    let cases: &[(&[(&str, &str)], &str, &str)] = &[
        (&one, "hf:org/repo", "m-Q4_0.gguf"),
        (&many, "hf:org/repo", "m-Q4_K_M.gguf"),
        (&many, "hf:org/repo:q4_0", "m-Q4_0.gguf"),
        (&many, "hf:org/repo:m.IQ4_XS.gguf", "m.IQ4_XS.gguf"),
        (&split, "hf:org/repo:Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        (&split, "hf:org/repo:Q2_K", "m-Q2_K.gguf"),
        (&folder, "hf:org/repo", ""),
        (&sharded, "hf:org/repo", ""),
    ];
    for (files, text, want) in cases {
        let dir = cache(files);
        let snapshot = dir.path().join("models--org--repo/snapshots").join(COMMIT);
        let found = hub(dir.path(), "http://127.0.0.1:9", true).find(&name(text));
        assert_eq!(found.expect("it is in the cache").join(""), snapshot.join(want).join(""), "{text}");
        let commit = text.replace("org/repo", &format!("org/repo@{COMMIT}"));
        hub(dir.path(), "http://127.0.0.1:9", true).find(&name(&commit)).expect("a commit is a revision");
    }
    for (files, text) in [
        (&one[..], "hf:org/repo:Q8_0"),
        (&one[..], "hf:org/repo@dev"),
        (&one[..], "hf:org/other"),
        (&split[..1], "hf:org/repo"),
        (&folder[..1], "hf:org/repo"),
        (&sharded[..3], "hf:org/repo"),
    ] {
        let dir = cache(files);
        let e = hub(dir.path(), "http://127.0.0.1:9", true).find(&name(text)).expect_err("it is not there");
        assert!(matches!(e, Error::Io { .. }) && e.to_string().contains("--offline"), "{text}: {e}");
        #[cfg(not(feature = "hub"))]
        {
            let e = hub(dir.path(), "http://127.0.0.1:9", false).find(&name(text)).expect_err("no network");
            assert!(
                matches!(e, Error::Unsupported { .. }) && e.to_string().contains("--features hub"),
                "{e}"
            );
        }
    }
    let dir =
        cache(&[("config.json", "{}"), ("model.safetensors.index.json", r#"{"weight_map": {"a": "../x"}}"#)]);
    let e = hub(dir.path(), "http://127.0.0.1:9", true).find(&name("hf:org/repo"));
    assert!(matches!(e, Err(Error::Format { .. })), "{e:?}");
}

#[cfg(feature = "hub")]
mod server {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    /// What a server answers.
    #[derive(Clone, Default)]
    struct Repo {
        files: BTreeMap<&'static str, Vec<u8>>,
        /// The status of every answer, if it is not 200.
        status: Option<u16>,
        etag: Option<&'static str>,
        /// Bytes that are announced beyond those that are sent.
        more: usize,
    }

    /// Starts a server; returns its address and the requests it got: path, range and token.
    fn serve(repo: Repo) -> (String, Arc<Mutex<Vec<(String, String, String)>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let log = Arc::new(Mutex::new(vec![]));
        let seen = log.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (mut path, mut range, mut token) = (String::new(), String::new(), String::new());
                let mut lines = BufReader::new(&stream).lines().map_while(std::io::Result::ok);
                for line in lines.by_ref().take_while(|l| !l.is_empty()) {
                    let lower = line.to_ascii_lowercase();
                    if let Some(rest) = line.strip_prefix("GET ") {
                        path = rest.split(' ').next().unwrap_or_default().into();
                    } else if let Some(r) = lower.strip_prefix("range: bytes=") {
                        range = r.into();
                    } else if lower.starts_with("authorization: ") {
                        token = line["authorization: ".len()..].into();
                    }
                }
                seen.lock().expect("the log").push((path.clone(), range.clone(), token));
                let answer = answer(&repo, &path, &range);
                let _ = (&stream).write_all(&answer);
            }
        });
        (address, log)
    }

    fn answer(repo: &Repo, path: &str, range: &str) -> Vec<u8> {
        let reply = |status: u16, headers: String, body: &[u8]| {
            let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}\r\n\r\n");
            [head.as_bytes(), body].concat()
        };
        if let Some(status) = repo.status {
            return reply(status, "Content-Length: 0".into(), &[]);
        }
        if path == "/api/models/org/repo/revision/main" {
            let names = repo.files.keys().map(|n| serde_json::json!({ "rfilename": n }));
            let body =
                serde_json::json!({ "sha": COMMIT, "siblings": names.collect::<Vec<_>>() }).to_string();
            let head = format!("Content-Type: application/json\r\nContent-Length: {}", body.len());
            return reply(200, head, body.as_bytes());
        }
        let file = path.strip_prefix("/org/repo/resolve/main/").and_then(|n| Some((n, repo.files.get(n)?)));
        let Some((file, data)) = file else { return reply(404, "Content-Length: 0".into(), &[]) };
        let (first, last) = range.split_once('-').unwrap_or(("0", ""));
        let first: usize = first.parse::<usize>().unwrap_or(0).min(data.len());
        let last = last.parse().unwrap_or(data.len().max(1) - 1);
        let body = &data[first..(last + 1).min(data.len())];
        let etag = repo.etag.map_or_else(|| format!("etag-{}", file.replace('/', "-")), str::to_string);
        let head = format!(
            "Content-Length: {}\r\nContent-Range: bytes {first}-{last}/{}\r\nETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}",
            body.len(),
            data.len() + repo.more
        );
        reply(206, head, body)
    }

    fn repo(files: &[(&'static str, &str)]) -> Repo {
        Repo { files: files.iter().map(|(n, t)| (*n, t.as_bytes().to_vec())).collect(), ..Repo::default() }
    }

    #[test]
    fn models_are_downloaded_once() {
        let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
        let folder = [
            ("config.json", "{}"),
            ("tokenizer.json", "{ }"),
            ("model.safetensors.index.json", index),
            ("model-1.safetensors", "one"),
            ("model-2.safetensors", "two"),
            ("pytorch_model.bin", "other"),
            ("../../escape", "hostile"),
        ];
        let split = [("q/m-Q8_0-00001-of-00002.gguf", "first"), ("q/m-Q8_0-00002-of-00002.gguf", "second")];
        for (files, text, last) in [
            (&folder[..], "hf:org/repo", "model-2.safetensors"),
            (&split[..], "hf:org/repo:Q8_0", "q/m-Q8_0-00002-of-00002.gguf"),
        ] {
            let (address, log) = serve(repo(files));
            let dir = tempfile::tempdir().expect("a folder");
            let mut hub = hub(dir.path(), &address, false);
            hub.token = Some("secret".into());
            let path = hub.find(&name(text)).expect("it is downloaded");
            let snapshot = dir.path().join("models--org--repo/snapshots").join(COMMIT);
            assert!(path.starts_with(&snapshot), "{}", path.display());
            let want = files.iter().find(|f| f.0 == last).expect("a file").1;
            assert_eq!(std::fs::read_to_string(snapshot.join(last)).expect("a file"), want);
            let requests = log.lock().expect("the log").clone();
            assert!(requests.iter().all(|r| r.2 == "Bearer secret"), "{requests:?}");
            assert!(!requests.iter().any(|r| r.0.contains("escape") || r.0.contains(".bin")), "{requests:?}");
            hub.offline = true;
            assert_eq!(hub.find(&name(text)).expect("it is in the cache"), path);
            assert_eq!(
                log.lock().expect("the log").len(),
                requests.len(),
                "no request for files in the cache"
            );
        }
    }

    #[test]
    fn a_partial_download_is_resumed() {
        let (address, log) = serve(repo(&[("m.gguf", "0123456789")]));
        let dir = tempfile::tempdir().expect("a folder");
        let blobs = dir.path().join("models--org--repo/blobs");
        std::fs::create_dir_all(&blobs).expect("a folder");
        std::fs::write(blobs.join("etag-m.part"), "0123").expect("it is written");
        let path = hub(dir.path(), &address, false).find(&name("hf:org/repo")).expect("it is downloaded");
        assert_eq!(std::fs::read_to_string(path).expect("a file"), "0123456789");
        let log = log.lock().expect("the log").clone();
        assert!(log.iter().any(|r| r.1 == "4-"), "{log:?}");
        // A partial file that is longer than the file.
        let dir = tempfile::tempdir().expect("a folder");
        let blobs = dir.path().join("models--org--repo/blobs");
        std::fs::create_dir_all(&blobs).expect("a folder");
        std::fs::write(blobs.join("etag-m.part"), "0123456789abc").expect("it is written");
        let e = hub(dir.path(), &address, false).find(&name("hf:org/repo")).expect_err("it is too long");
        assert!(e.to_string().contains(".part"), "{e}");
    }

    #[test]
    fn failures_say_what_to_do() {
        let with = |status: u16| Repo { status: Some(status), ..Repo::default() };
        let gguf = || repo(&[("m.gguf", "0123456789")]);
        for (repo, text, says) in [
            (with(401), "hf:org/repo", "HF_TOKEN"),
            (with(403), "hf:org/repo", "HF_TOKEN"),
            (with(404), "hf:org/repo", "check the name"),
            (with(500), "hf:org/repo", "HF_ENDPOINT"),
            (gguf(), "hf:org/other", "check the name"),
            (gguf(), "hf:org/repo:Q4_K_M", "it has m"),
            (repo(&[("../m.gguf", "hostile")]), "hf:org/repo", "neither GGUF"),
            (Repo { more: 5, ..gguf() }, "hf:org/repo", "15 were announced"),
            (Repo { etag: Some("../../../x"), ..gguf() }, "hf:org/repo", "malformed etag"),
        ] {
            let (address, _) = serve(repo);
            let dir = tempfile::tempdir().expect("a folder");
            let hub = hub(dir.path(), &address, false);
            let e = hub.find(&name(text)).expect_err("it fails").to_string();
            assert!(e.contains(says), "{text}: {e}");
            let offline = Hub { offline: true, ..hub };
            assert!(offline.find(&name(text)).is_err(), "{text}: nothing incomplete stays in the cache");
        }
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let dir = tempfile::tempdir().expect("a folder");
        let e = hub(dir.path(), &format!("http://{closed}"), false).find(&name("hf:org/repo"));
        assert!(e.expect_err("nobody listens").to_string().contains("HF_ENDPOINT"));
    }
}
