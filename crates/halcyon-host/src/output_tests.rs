use super::*;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::process::Command;

fn names(dir: &Path) -> Vec<String> {
    let mut all: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

#[test]
fn links_stay_and_their_targets_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let at = |n: &str| dir.path().join(n);
    fs::create_dir(at("deep")).unwrap();
    fs::write(at("deep/file"), b"old").unwrap();
    fs::set_permissions(at("deep/file"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("file", at("deep/near")).unwrap();
    symlink("deep/near", at("far")).unwrap();
    write(&at("far"), b"new").unwrap();
    assert_eq!(fs::read(at("deep/file")).unwrap(), b"new");
    assert_eq!(fs::metadata(at("deep/file")).unwrap().mode() & 0o777, 0o640);
    assert!(fs::symlink_metadata(at("far")).unwrap().is_symlink());
    assert_eq!(names(&at("deep")), ["file", "near"]);
    // Writing through a dangling link creates the file it names. A cycle of links is an error.
    symlink("deep/none", at("dangling")).unwrap();
    write(&at("dangling"), b"made").unwrap();
    assert_eq!(fs::read(at("deep/none")).unwrap(), b"made");
    symlink("b", at("a")).unwrap();
    symlink("a", at("b")).unwrap();
    let e = write(&at("a"), b"x").unwrap_err().to_string();
    assert!(e.contains("links"), "{e}");
}

#[test]
fn devices_and_pipes_are_written_in_place() {
    let null = Path::new("/dev/null");
    write(null, b"x").unwrap();
    assert!(fs::metadata(null).unwrap().file_type().is_char_device());
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("link");
    symlink("/dev/null", &link).unwrap();
    write(&link, b"x").unwrap();
    assert!(fs::metadata(null).unwrap().file_type().is_char_device());
    assert_eq!(place(&link).unwrap(), Place::Device("/dev/null".into()));
    let full = Path::new("/dev/full");
    if fs::metadata(full).is_ok() {
        let e = write(full, b"x").unwrap_err().to_string();
        assert!(e.starts_with("/dev/full: ") && e.contains("space"), "{e}");
        assert!(fs::metadata(full).unwrap().file_type().is_char_device());
    }
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read(pipe).unwrap()
    });
    let mut o = Output::create(&pipe).unwrap();
    assert!(o.is_stream());
    o.write_all(b"hello").unwrap();
    assert_eq!(o.finish().unwrap(), 5);
    assert_eq!(reader.join().unwrap(), b"hello");
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
}

#[test]
fn descriptors_are_not_treated_as_files() {
    assert_eq!(place(Path::new("-")).unwrap(), Place::Stdout);
    assert_eq!(place(Path::new("/dev/stdout")).unwrap(), Place::Stdout);
    assert_eq!(place(Path::new("/dev/fd/2")).unwrap(), Place::Stderr);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let file = File::create(&path).unwrap();
    (&file).write_all(b"begun ").unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&file);
    write(Path::new(&format!("/dev/fd/{number}")), b"and ended").unwrap();
    // The write reaches the open file, not another file of the same name.
    assert_eq!(fs::read(&path).unwrap(), b"begun and ended");
    assert_eq!(fs::metadata(&path).unwrap().ino(), file.metadata().unwrap().ino());
    // A regular file whose name is a number is not a descriptor.
    let one = dir.path().join("1");
    write(&one, b"1").unwrap();
    assert_eq!(fs::read(&one).unwrap(), b"1");
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    for old in [None, Some(b"old")] {
        if let Some(old) = old {
            fs::write(&path, old).unwrap();
        }
        let e = write_with(&path, |o| {
            o.write_all(b"half")?;
            Err(ErrorKind::StorageFull.into())
        });
        assert!(matches!(e, Err(Error::Io { .. })));
        drop(Output::create(&path).unwrap());
        assert_eq!(fs::read(&path).ok(), old.map(|o| o.to_vec()));
    }
    assert_eq!(names(dir.path()), ["file"]);
}

#[test]
fn folders_and_read_only_paths_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let says = |path: &Path, part: &str| {
        let e = write(path, b"x").unwrap_err();
        assert!(matches!(&e, Error::Io { .. }) && e.to_string().contains(part), "{e}");
    };
    says(dir.path(), "folder");
    says(&dir.path().join("new/"), "folder");
    says(&dir.path().join("none/file"), "make the folder first");
    let link = dir.path().join("link");
    symlink(dir.path(), &link).unwrap();
    says(&link, "folder");
    // Root can write anywhere, so check first whether the folder is locked.
    let locked = dir.path().join("locked");
    fs::create_dir(&locked).unwrap();
    fs::write(locked.join("file"), b"old").unwrap();
    fs::set_permissions(locked.join("file"), fs::Permissions::from_mode(0o400)).unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o500)).unwrap();
    if File::create(locked.join("probe")).is_err() {
        says(&locked.join("file"), "denied");
        says(&locked.join("new"), "no file can be created");
    }
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn file_names_need_not_be_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(std::ffi::OsStr::from_bytes(b"a\xff\n"));
    write(&path, b"x").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"x");
    let long = dir.path().join("n".repeat(255));
    write(&long, b"x").unwrap();
    write(&long, b"y").unwrap();
    assert_eq!(fs::read(&long).unwrap(), b"y");
}
