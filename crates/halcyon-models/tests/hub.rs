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
        "hf:a/b:x/../y",
        "hf:a/b:x?y",
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
    let folder = [("config.json", "{}"), ("model.safetensors", ""), ("tokenizer.json", "{}")];
    let sharded = [
        ("tokenizer.json", "{}"),
        ("config.json", "{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", ""),
        ("model-2.safetensors", ""),
    ];
    let modules = r#"[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]"#;
    let embedder = [folder[0], folder[1], ("modules.json", modules), ("1_Pooling/config.json", "{}")];
    let adapters = [("adapter_config.json", "{}"), ("adapter_model.safetensors", ""), ("README.md", "")];
    let cases: &[(&[(&str, &str)], &str, &str)] = &[
        (&adapters, "hf:org/repo", ""),
        (&one, "hf:org/repo", "m-Q4_0.gguf"),
        (&many, "hf:org/repo", "m-Q4_K_M.gguf"),
        (&many, "hf:org/repo:q4_0", "m-Q4_0.gguf"),
        (&many, "hf:org/repo:m.IQ4_XS.gguf", "m.IQ4_XS.gguf"),
        (&split, "hf:org/repo:Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        (&split, "hf:org/repo:Q2_K", "m-Q2_K.gguf"),
        (&folder, "hf:org/repo", ""),
        (&embedder, "hf:org/repo", ""),
        (&sharded, "hf:org/repo", ""),
    ];
    for (files, text, want) in cases {
        let dir = cache(files);
        let snapshot = dir.path().join("models--org--repo/snapshots").join(COMMIT);
        let found = hub(dir.path(), "http://127.0.0.1:9", true).find(&name(text), &mut |_| {});
        assert_eq!(found.expect("it is in the cache").join(""), snapshot.join(want).join(""), "{text}");
        let commit = text.replace("org/repo", &format!("org/repo@{COMMIT}"));
        hub(dir.path(), "http://127.0.0.1:9", true)
            .find(&name(&commit), &mut |_| {})
            .expect("a commit is a revision");
    }
    for (files, text) in [
        (&one[..], "hf:org/repo:Q8_0"),
        (&one[..], "hf:org/repo@dev"),
        (&one[..], "hf:org/other"),
        (&split[..1], "hf:org/repo"),
        (&folder[..1], "hf:org/repo"),
        (&adapters[..1], "hf:org/repo"),
        (&sharded[..4], "hf:org/repo"),
        (&embedder[..3], "hf:org/repo"),
    ] {
        let dir = cache(files);
        let e = hub(dir.path(), "http://127.0.0.1:9", true)
            .find(&name(text), &mut |_| {})
            .expect_err("it is not there");
        assert!(matches!(e, Error::Io { .. }) && e.to_string().contains("--offline"), "{text}: {e}");
        #[cfg(not(feature = "hub"))]
        {
            let e = hub(dir.path(), "http://127.0.0.1:9", false)
                .find(&name(text), &mut |_| {})
                .expect_err("no network");
            assert!(
                matches!(e, Error::Unsupported { .. }) && e.to_string().contains("--features hub"),
                "{e}"
            );
        }
    }
    // A name that says nothing of the file, and one file of perhaps several.
    let dir = cache(&one);
    let found = hub(dir.path(), "http://127.0.0.1:9", false).find(&name("hf:org/repo"), &mut |_| {});
    assert!(found.expect("no server, but a file").ends_with("m-Q4_0.gguf"));
    let dir =
        cache(&[("config.json", "{}"), ("model.safetensors.index.json", r#"{"weight_map": {"a": "../x"}}"#)]);
    let e = hub(dir.path(), "http://127.0.0.1:9", true).find(&name("hf:org/repo"), &mut |_| {});
    assert!(matches!(e, Err(Error::Format { .. })), "{e:?}");
}

#[cfg(feature = "hub")]
mod server {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    const DIGITS: &[u8] = b"0123456789";
    /// The SHA-256 of [`DIGITS`], and the hash that git gives them.
    const SHA256: &str = "84d89877f0d4041efb6bf91a16f0248f2fd573e6af05c19f96bedb9f882f7882";
    const GIT: &str = "ad471007bd7f5983d273b9584e5629230150fd54";

    /// What a server answers.
    #[derive(Clone)]
    struct Repo {
        files: BTreeMap<String, Vec<u8>>,
        /// The status of every answer, with further headers.
        status: Option<(u16, &'static str)>,
        /// The status of answers for files.
        file_status: Option<(u16, &'static str)>,
        etag: Option<&'static str>,
        /// The server that has the files, to which this one redirects.
        content: Option<String>,
        /// The bytes after which the connections end.
        cut: Option<usize>,
        /// The size that is announced first.
        size: Option<usize>,
        /// The answer to GET has no length and does not end.
        endless: bool,
        /// Parts of files are not sent.
        whole: bool,
        listing: Option<&'static str>,
    }

    fn repo(files: &[(&str, &str)]) -> Repo {
        Repo {
            files: files.iter().map(|(n, t)| (n.to_string(), t.as_bytes().to_vec())).collect(),
            status: None,
            file_status: None,
            etag: None,
            content: None,
            cut: None,
            size: None,
            endless: false,
            whole: false,
            listing: None,
        }
    }

    fn digits() -> Repo {
        repo(&[("m.gguf", "0123456789")])
    }

    #[derive(Clone, Default, Debug)]
    struct Request {
        method: String,
        path: String,
        range: String,
        token: String,
    }

    type Log = Arc<Mutex<Vec<Request>>>;

    /// Starts a server; returns its address and the requests it got.
    fn serve(repo: Repo) -> (String, Log) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let log = Log::default();
        let seen = log.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut request = Request::default();
                let mut lines = BufReader::new(&stream).lines().map_while(std::io::Result::ok);
                for line in lines.by_ref().take_while(|l| !l.is_empty()) {
                    let lower = line.to_ascii_lowercase();
                    if let Some(r) = lower.strip_prefix("range: bytes=") {
                        request.range = r.into();
                    } else if lower.starts_with("authorization: ") {
                        request.token = line["authorization: ".len()..].into();
                    } else if line.ends_with(" HTTP/1.1") {
                        let mut words = line.split(' ').map(str::to_string);
                        request.method = words.next().unwrap_or_default();
                        request.path = words.next().unwrap_or_default();
                    }
                }
                seen.lock().expect("the log").push(request.clone());
                // A client that has enough closes the connection.
                let _ = answer(&repo, &request, &stream);
            }
        });
        (address, log)
    }

    fn answer(repo: &Repo, r: &Request, mut out: &TcpStream) -> std::io::Result<()> {
        let head = r.method == "HEAD";
        let mut reply = |status: u16, headers: &str, body: &[u8]| {
            let text = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}\r\n");
            out.write_all(text.as_bytes())?;
            out.write_all(if head { &[] } else { body })
        };
        let empty = "Content-Length: 0\r\n";
        if let Some((status, headers)) = repo.status {
            return reply(status, &format!("{empty}{headers}"), &[]);
        }
        if r.path == "/api/models/org/repo/revision/main" {
            let names = repo.files.keys().map(|n| serde_json::json!({ "rfilename": n }));
            let body = serde_json::json!({ "sha": COMMIT, "siblings": names.collect::<Vec<_>>() });
            let body = repo.listing.map_or(body.to_string(), str::to_string);
            return reply(200, &format!("Content-Length: {}\r\n", body.len()), body.as_bytes());
        }
        let place = format!("/org/repo/resolve/{COMMIT}/");
        let name = r.path.strip_prefix(&place).or_else(|| r.path.strip_prefix("/moved/"));
        let file = name.and_then(|n| Some((n.replace("%20", " "), repo.files.get(&n.replace("%20", " "))?)));
        let Some((file, data)) = file else {
            return reply(404, &format!("{empty}X-Error-Code: EntryNotFound\r\n"), &[]);
        };
        if let Some((status, headers)) = repo.file_status {
            return reply(status, &format!("{empty}{headers}"), &[]);
        }
        let etag =
            repo.etag.map_or_else(|| format!("etag-{}", file.replace(['/', ' '], "-")), str::to_string);
        let size = repo.size.unwrap_or(data.len());
        if let Some(to) = &repo.content {
            // Large files are linked; small ones move on the same server, and say so before.
            let linked = match file.ends_with(".gguf") {
                true => format!(
                    "X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {size}\r\nLocation: {to}{}\r\n",
                    r.path
                ),
                false if r.path.starts_with("/moved/") => String::new(),
                false => format!("Location: /moved/{file}\r\n"),
            };
            if !linked.is_empty() {
                return reply(
                    if file.ends_with(".gguf") { 302 } else { 307 },
                    &format!("{empty}{linked}"),
                    &[],
                );
            }
        }
        let first: usize = r.range.trim_end_matches('-').parse().unwrap_or(0);
        let part = !r.range.is_empty() && !repo.whole;
        let first = if part { first.min(data.len()) } else { 0 };
        let announced = if head { size } else { data.len() };
        let mut headers = format!("ETag: \"{etag}\"\r\n");
        if part {
            headers += &format!("Content-Range: bytes {first}-{}/{announced}\r\n", data.len().max(1) - 1);
        }
        if repo.endless && !head {
            reply(200, &headers, data)?;
            loop {
                out.write_all(&[b'x'; 1 << 16])?;
            }
        }
        headers += &format!("Content-Length: {}\r\n", announced - first);
        let end = repo.cut.map_or(data.len(), |n| (first + n).min(data.len()));
        reply(if part { 206 } else { 200 }, &headers, &data[first..end])
    }

    fn find(hub: &Hub, text: &str) -> halcyon::Result<std::path::PathBuf> {
        hub.find(&name(text), &mut |_| {})
    }

    fn snapshot(dir: &TempDir) -> std::path::PathBuf {
        dir.path().join("models--org--repo/snapshots").join(COMMIT)
    }

    fn requests(log: &Log) -> Vec<Request> {
        log.lock().expect("the log").clone()
    }

    #[test]
    fn models_are_downloaded_once() {
        let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
        let modules = r#"[{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "../x"}]"#;
        let folder = [
            ("config.json", "{}"),
            ("tokenizer.json", "{ }"),
            ("modules.json", modules),
            ("1_Pooling/config.json", "{}"),
            ("model.safetensors.index.json", index),
            ("model-1.safetensors", "one"),
            ("model-2.safetensors", "two"),
            ("pytorch_model.bin", "other"),
            ("../../escape", "hostile"),
            ("/escape", "hostile"),
        ];
        let split = [
            ("q 8/m-Q8_0-00001-of-00002.gguf", "first"),
            ("q 8/m-Q8_0-00002-of-00002.gguf", "second"),
            ("q 8/../../m-Q8_0.gguf", "hostile"),
        ];
        for (files, text, last) in [
            (&folder[..], "hf:org/repo", "model-2.safetensors"),
            (&folder[..], "hf:org/repo", "1_Pooling/config.json"),
            (&split[..], "hf:org/repo:Q8_0", "q 8/m-Q8_0-00002-of-00002.gguf"),
            (
                &[("m-00000-of-00000.gguf", "not split")],
                "hf:org/repo:m-00000-of-00000",
                "m-00000-of-00000.gguf",
            ),
        ] {
            let (address, log) = serve(repo(files));
            let dir = tempfile::tempdir().expect("a folder");
            let mut hub = hub(dir.path(), &address, false);
            hub.token = Some("secret".into());
            assert!(!format!("{hub:?}").contains("secret"), "a token is not printed");
            let mut told = vec![];
            let found = hub.find(&name(text), &mut |p| told.push((p.file.to_string(), p.done, p.size)));
            let path = found.expect("it is downloaded");
            assert!(path.starts_with(snapshot(&dir)), "{}", path.display());
            let want = files.iter().find(|f| f.0 == last).expect("a file").1;
            assert_eq!(std::fs::read_to_string(snapshot(&dir).join(last)).expect("a file"), want);
            assert!(told.contains(&(last.to_string(), want.len() as u64, want.len() as u64)), "{told:?}");
            let all = requests(&log);
            assert!(all.iter().all(|r| r.token == "Bearer secret"), "{all:?}");
            assert!(!all.iter().any(|r| r.path.contains("..") || r.path.contains(".bin")), "{all:?}");
            assert!(!all.iter().any(|r| r.path.ends_with("/escape")), "{all:?}");
            for offline in [true, false] {
                hub.offline = offline;
                assert_eq!(find(&hub, text).expect("it is in the cache"), path);
            }
            assert_eq!(requests(&log).len(), all.len(), "no request for files in the cache");
        }
    }

    #[test]
    fn the_choice_is_that_of_the_repository_and_not_of_the_cache() {
        let files = [("m-Q4_0.gguf", "small"), ("m-Q4_K_M.gguf", "usual"), ("m-Q8_0.gguf", "large")];
        let (address, _) = serve(repo(&files));
        let dir = tempfile::tempdir().expect("a folder");
        let hub = hub(dir.path(), &address, false);
        for (text, want) in
            [("hf:org/repo:Q8_0", "large"), ("hf:org/repo", "usual"), ("hf:org/repo:q4_0", "small")]
        {
            let path = find(&hub, text).expect("it is downloaded");
            assert_eq!(std::fs::read_to_string(path).expect("a file"), want, "{text}");
        }
    }

    #[test]
    fn redirects_are_followed_without_the_token() {
        let files = [("m.gguf", "0123456789"), ("config.json", "{}"), ("model.safetensors", "w")];
        let (content, content_log) = serve(repo(&files));
        let (address, log) = serve(Repo { content: Some(content), etag: Some(SHA256), ..repo(&files) });
        let dir = tempfile::tempdir().expect("a folder");
        let hub = Hub { token: Some("secret".into()), ..hub(dir.path(), &address, false) };
        let path = find(&hub, "hf:org/repo:m").expect("it is downloaded");
        assert_eq!(std::fs::read(path).expect("a file"), DIGITS);
        let blob = dir.path().join("models--org--repo/blobs").join(SHA256);
        assert_eq!(std::fs::read(blob).expect("its name is the hash"), DIGITS);
        assert!(requests(&log).iter().all(|r| r.token == "Bearer secret"));
        let elsewhere = requests(&content_log);
        assert!(!elsewhere.is_empty() && elsewhere.iter().all(|r| r.token.is_empty()), "{elsewhere:?}");
        let moved = Repo { content: Some(String::new()), ..repo(&files) };
        let (address, log) = serve(moved);
        let dir = tempfile::tempdir().expect("a folder");
        let hub = Hub { token: Some("secret".into()), endpoint: address, cache: dir.path().into(), ..hub };
        let folder = find(&hub, "hf:org/repo").expect("it is downloaded");
        assert_eq!(std::fs::read_to_string(folder.join("config.json")).expect("a file"), "{}");
        assert!(requests(&log).iter().all(|r| r.token == "Bearer secret"), "the same server");
    }

    #[test]
    fn a_download_goes_on_where_it_ended() {
        // Each connection brings four bytes.
        for etag in [SHA256, GIT, "other"] {
            let (address, log) = serve(Repo { cut: Some(4), etag: Some(etag), ..digits() });
            let dir = tempfile::tempdir().expect("a folder");
            let path = find(&hub(dir.path(), &address, false), "hf:org/repo").expect("it is downloaded");
            assert_eq!(std::fs::read(path).expect("a file"), DIGITS);
            let ranges: Vec<String> = requests(&log).into_iter().skip(2).map(|r| r.range).collect();
            assert_eq!(ranges, ["", "4-", "8-"], "{etag}");
        }
        let with_partial = |bytes: &[u8]| {
            let dir = tempfile::tempdir().expect("a folder");
            let blobs = dir.path().join("models--org--repo/blobs");
            std::fs::create_dir_all(&blobs).expect("a folder");
            let partial = blobs.join(format!("{SHA256}.incomplete"));
            std::fs::write(&partial, bytes).expect("it is written");
            (dir, partial)
        };
        for (partial, whole, range) in [
            (&b"0123"[..], false, "4-"),
            (b"0123", true, "4-"),
            (b"0123456789abc", false, ""),
            (DIGITS, false, "none"),
        ] {
            let (address, log) = serve(Repo { etag: Some(SHA256), whole, ..digits() });
            let (dir, file) = with_partial(partial);
            let path = find(&hub(dir.path(), &address, false), "hf:org/repo").expect("it is downloaded");
            assert_eq!(std::fs::read(path).expect("a file"), DIGITS);
            assert!(!file.exists());
            let got = requests(&log).get(2).map_or("none".into(), |r| r.range.clone());
            assert_eq!(got, range, "{partial:?}");
        }
        // What is there is not the beginning of the file.
        let (address, _) = serve(Repo { etag: Some(SHA256), ..digits() });
        let (dir, file) = with_partial(b"abcd");
        let hub = hub(dir.path(), &address, false);
        let e = find(&hub, "hf:org/repo").expect_err("the hash differs").to_string();
        assert!(e.contains("hash") && !file.exists(), "{e}");
        assert_eq!(std::fs::read(find(&hub, "hf:org/repo").expect("again")).expect("a file"), DIGITS);
    }

    #[test]
    fn failures_say_what_to_do() {
        let status =
            |status: u16, headers: &'static str| Repo { status: Some((status, headers)), ..digits() };
        let of_file = |s: u16, h: &'static str| Repo { file_status: Some((s, h)), ..digits() };
        let listing = |text: &'static str| Repo { listing: Some(text), ..digits() };
        let cases: Vec<(Repo, &str, &str, i32)> = vec![
            (status(401, ""), "hf:org/repo", "HF_TOKEN", 1),
            (
                status(401, "X-Error-Code: RepoNotFound\r\n"),
                "hf:org/repo",
                "no such repository, or a private one",
                1,
            ),
            (status(404, ""), "hf:org/repo", "check the name", 1),
            (status(429, ""), "hf:org/repo", "wait", 1),
            (status(500, ""), "hf:org/repo", "try later", 1),
            (status(302, "Location: /again\r\n"), "hf:org/repo", "redirects more than", 1),
            (status(302, "Location: ftp://x\r\n"), "hf:org/repo", "not a URL", 1),
            (status(302, ""), "hf:org/repo", "not a URL", 1),
            (of_file(403, "X-Error-Code: GatedRepo\r\n"), "hf:org/repo", "accept its terms", 1),
            (of_file(404, ""), "hf:org/repo", "check the name", 1),
            (of_file(302, "Location: /again\r\n"), "hf:org/repo", "check the name", 1),
            (digits(), "hf:org/other", "check the name", 1),
            (digits(), "hf:org/repo:Q4_K_M", "it has m", 2),
            (digits(), "hf:org/repo:x/y.gguf", "it has m", 2),
            (repo(&[("a.gguf", ""), ("b.gguf", "")]), "hf:org/repo", "a, b", 2),
            (repo(&[("a-Q8_0.gguf", ""), ("b-Q8_0.gguf", "")]), "hf:org/repo:Q8_0", "a-Q8_0, b-Q8_0", 2),
            (repo(&[("m-00001-of-00002.gguf", "")]), "hf:org/repo", "m-00002-of-00002.gguf", 2),
            (repo(&[("m-00001-of-99999.gguf", "")]), "hf:org/repo", "m-00002-of-99999", 2),
            (repo(&[("../m.gguf", "hostile")]), "hf:org/repo", "neither GGUF", 2),
            (repo(&[("config.json", "{}"), ("pytorch_model.bin", "")]), "hf:org/repo", "neither GGUF", 2),
            (Repo { size: Some(15), ..digits() }, "hf:org/repo", "announced 15 bytes, and then 10", 1),
            (Repo { size: Some(5), ..digits() }, "hf:org/repo", "announced 5 bytes, and then 10", 1),
            (Repo { cut: Some(0), ..digits() }, "hf:org/repo", "run again to go on", 1),
            (Repo { etag: Some("../../../x"), ..digits() }, "hf:org/repo", "malformed", 1),
            (Repo { etag: Some(".."), ..digits() }, "hf:org/repo", "malformed", 1),
            (Repo { etag: Some(""), ..digits() }, "hf:org/repo", "no etag", 1),
            (Repo { etag: Some(COMMIT), ..digits() }, "hf:org/repo", "hash", 1),
            (listing("{"), "hf:org/repo", "not JSON", 1),
            (listing(r#"{"sha": "../..", "siblings": []}"#), "hf:org/repo", "no commit", 1),
            (listing(r#"{"sha": "0123456789"}"#), "hf:org/repo", "no list of files", 1),
        ];
        for (repo, text, says, code) in cases {
            let (address, _) = serve(repo);
            let dir = tempfile::tempdir().expect("a folder");
            let hub = hub(dir.path(), &address, false);
            let e = find(&hub, text).expect_err(says);
            assert!(e.to_string().contains(says) && e.exit_code() == code, "{says}: {e}");
            let offline = Hub { offline: true, ..hub };
            assert!(
                find(&offline, text).is_err(),
                "{says}: nothing incomplete counts as a file of the cache"
            );
        }
        let with_token = |hub: Hub| Hub { token: Some("t".into()), ..hub };
        let (address, _) = serve(status(403, ""));
        let dir = tempfile::tempdir().expect("a folder");
        let e = find(&with_token(hub(dir.path(), &address, false)), "hf:org/repo").expect_err("no access");
        assert!(e.to_string().contains("the token (HF_TOKEN) does not give access"), "{e}");
        let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        let e = find(&hub(dir.path(), &format!("http://{closed}"), false), "hf:org/repo");
        assert!(e.expect_err("nobody listens").to_string().contains("HF_ENDPOINT"));
        for endpoint in ["huggingface.co", "ftp://x", "http://", ""] {
            let e = find(&hub(dir.path(), endpoint, false), "hf:org/repo");
            assert!(matches!(e, Err(Error::Argument { .. })), "{endpoint}: {e:?}");
        }
    }

    #[test]
    fn an_endless_answer_ends() {
        let (address, _) = serve(Repo { endless: true, size: Some(20), ..digits() });
        let dir = tempfile::tempdir().expect("a folder");
        let path = find(&hub(dir.path(), &address, false), "hf:org/repo").expect("what was announced");
        assert_eq!(std::fs::read(path).expect("a file"), b"0123456789xxxxxxxxxx");
        let (address, _) = serve(Repo { endless: true, size: Some(20), etag: Some(SHA256), ..digits() });
        let e =
            find(&hub(dir.path(), &address, false), "hf:org/repo@main:m").expect("the file that is there");
        assert!(e.ends_with("m.gguf"));
        let dir = tempfile::tempdir().expect("a folder");
        let e = find(&hub(dir.path(), &address, false), "hf:org/repo").expect_err("other bytes");
        assert!(e.to_string().contains("hash"), "{e}");
    }

    #[cfg(unix)]
    #[test]
    fn errors_of_the_disk_name_the_place() {
        let (address, _) = serve(digits());
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("cache");
        std::fs::write(&file, "not a folder").expect("it is written");
        let e = find(&hub(&file, &address, false), "hf:org/repo").expect_err("a file is no folder");
        assert!(matches!(&e, Error::Io { path, .. } if path.contains("cache")), "{e}");
        // A full disk.
        let blobs = dir.path().join("models--org--repo/blobs");
        std::fs::create_dir_all(&blobs).expect("a folder");
        std::os::unix::fs::symlink("/dev/full", blobs.join("etag-m.gguf.incomplete")).expect("a link");
        let e = find(&hub(dir.path(), &address, false), "hf:org/repo").expect_err("nothing can be written");
        assert!(matches!(&e, Error::Io { path, .. } if path.contains("etag-m.gguf.incomplete")), "{e}");
    }
}
