//! Messages about libraries that are loaded at run time.

/// The loader's message for a library: the innermost error, without the library's name as prefix.
pub(crate) fn loader_text(name: &str, e: &dyn std::error::Error) -> String {
    let mut e = e;
    while let Some(s) = e.source() {
        e = s;
    }
    let text = e.to_string();
    let text = text.strip_prefix(&format!("{name}: ")).map(String::from).unwrap_or(text);
    match foreign(std::path::Path::new(name)) {
        true => format!("it is built for another processor ({text})"),
        false => text,
    }
}

/// Summarises why no name could be loaded: `thing` is not on this machine, or a file exists but fails to
/// load. `tried` has one line per name, `NAME: loader's message`.
pub(crate) fn not_loaded(thing: &str, tried: &[String]) -> String {
    // Messages of the loaders of Linux, macOS and Windows for a missing file.
    let said = ["cannot open shared object file: No such file or directory", "no such file", "os error 126"];
    let absent = |t: &String| {
        let Some((name, what)) = t.split_once(": ") else { return false };
        // A path was set by the user or found by a search, so a file that is missing there is a failure to
        // load. It does not mean that the library is not on this machine. Paths below /System/ (macOS) are
        // fixed, so they count as names.
        let named = name.contains(['/', '\\']) && !name.starts_with("/System/");
        !named && said.iter().any(|s| what.contains(s)) && !what.contains("it is built for")
    };
    match tried.iter().all(absent) {
        true => format!("no {thing} on this machine"),
        false => format!("the {thing} could not be loaded"),
    }
}

/// Whether a path is an ELF file of another class, byte order or machine than this program. glibc reports
/// such a file as missing.
fn foreign(path: &std::path::Path) -> bool {
    let head = |p: &std::path::Path| -> Option<[u8; 20]> {
        let mut head = [0; 20];
        std::io::Read::read_exact(&mut std::fs::File::open(p).ok()?, &mut head).ok()?;
        head.starts_with(b"\x7fELF").then_some(head)
    };
    // Class and byte order, then machine.
    let kind = |h: [u8; 20]| (h[4], h[5], h[18], h[19]);
    let own = std::env::current_exe().ok().and_then(|p| head(&p));
    head(path).zip(own).is_some_and(|(a, b)| kind(a) != kind(b))
}
