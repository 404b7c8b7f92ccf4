use super::*;
use proptest::prelude::*;

fn variant(n: u32) -> Variant {
    Variant::new("tiled", &[("side", n)])
}

fn best(n: u32, measured: u64) -> Best {
    Best {
        variant: variant(n),
        program: format!("{n:x}"),
        default: variant(0),
        gain: 1.0 + f64::from(n) / 8.0,
        interval: (1.0, 2.0),
        seconds: 0.5,
        default_seconds: 1.0,
        error: 0.1,
        tried: 3,
        measured,
    }
}

fn rejection(n: u32) -> Rejection {
    let why = [RejectReason::Wrong, RejectReason::Crashed, RejectReason::Hung][n as usize % 3];
    Rejection { variant: variant(n), why, detail: format!("seen {n}") }
}

prop_compose! {
    fn entry()(device in 0u32..2, key in 0u32..4, best_of in proptest::option::of((0u32..4, 0u64..4)),
               rejected in proptest::collection::vec(0u32..100, 0..80), used in 0u64..1000) -> Entry {
        Entry {
            device: format!("d{device}"),
            key: format!("k{key}"),
            best: best_of.map(|(n, m)| best(n, m)),
            rejected: rejected.into_iter().map(rejection).collect(),
            used,
        }
    }
}

fn table(entries: &[Entry]) -> Table {
    let mut t = Table::default();
    entries.iter().for_each(|e| t.add(e));
    t
}

fn parsed(text: &str) -> Table {
    Table::of(&serde_json::from_str(text).unwrap())
}

proptest! {
    #[test]
    fn tables_merge_in_any_order_to_the_same(mut all in proptest::collection::vec(entry(), 0..12), cut in 0usize..12) {
        let whole = table(&all);
        let (a, b) = all.split_at(cut.min(all.len()));
        let (a, b) = (table(a), table(b));
        let mut ab = a.clone();
        ab.merge(&b);
        let mut ba = b;
        ba.merge(&a);
        prop_assert_eq!(&ab, &whole);
        prop_assert_eq!(&ba, &whole);
        ba.merge(&whole.clone());
        prop_assert_eq!(&ba, &whole);
        all.reverse();
        prop_assert_eq!(&table(&all), &whole);
        for e in whole.entries() {
            prop_assert!(e.rejected.len() <= MAX_REJECTIONS);
            prop_assert!(e.rejected.is_sorted_by(|x, y| x.variant < y.variant));
        }
        // What is written can be read back.
        let mut t = whole.clone();
        prop_assert_eq!(&parsed(&t.render(MAX_BYTES)), &whole);
    }

    #[test]
    fn files_are_bounded_and_the_least_used_go_first(used in proptest::collection::vec(0u64..50, 1..60), most in 1usize..40) {
        let one = |(i, u): (usize, &u64)| {
            Entry { key: format!("k{i}"), best: Some(best(1, 1)), used: *u, ..Entry::new("d", "") }
        };
        let all: Vec<Entry> = used.iter().enumerate().map(one).collect();
        let mut t = table(&all);
        t.trim(most);
        prop_assert_eq!(t.len(), most.min(all.len()));
        let gone = all.iter().filter(|e| t.get("d", &e.key).is_none()).map(|e| e.used).max();
        let kept = t.entries().map(|e| e.used).min();
        prop_assert!(gone <= kept || gone.is_none());
        let bytes = 4000;
        let text = t.render(bytes);
        prop_assert!(text.len() <= bytes && parsed(&text) == t);
    }
}

#[test]
fn a_rejected_variant_is_not_the_best() {
    let mut e = Entry { best: Some(best(1, 5)), ..Entry::new("d", "k") };
    assert_eq!(e.best().map(|b| b.variant.clone()), Some(variant(1)));
    e.merge(&Entry { rejected: vec![rejection(1)], ..Entry::new("d", "k") });
    assert!(e.best().is_none() && e.best.is_some());
    let c = TuningCache::memory();
    c.add(&e);
    assert!(c.tuned_variants("d").is_empty());
    c.clear_rejections("d").unwrap();
    assert_eq!((c.tuned_variants("d").len(), c.tuned_variants("other").len()), (1, 0));
}

fn names(dir: &Path) -> Vec<String> {
    let all = fs::read_dir(dir).unwrap().flatten().map(|f| f.file_name());
    let mut all: Vec<String> = all.map(|n| n.to_string_lossy().into_owned()).collect();
    all.sort();
    all
}

fn filled() -> Entry {
    Entry { best: Some(best(2, 7)), ..Entry::new("d", "k") }
}

#[test]
fn damaged_files_are_renamed_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep/er/tuning.json");
    let c = TuningCache::at(&path);
    c.add(&filled());
    c.save().unwrap();
    assert_eq!(TuningCache::at(&path).get("d", "k").as_ref(), Some(&filled()));
    assert!(c.warnings().is_empty());
    let whole = fs::read_to_string(&path).unwrap();
    let mut flipped = whole.clone().into_bytes();
    let middle = flipped.len() / 2;
    flipped[middle] = 0xff;
    let damaged = [
        (whole.as_bytes()[..whole.len() / 2].to_vec(), "EOF"),
        (whole.as_bytes()[..12].to_vec(), "EOF"),
        (flipped, "not text"),
        (vec![0; 100], "zeros"),
        (b"{\"format\": 1, \"entries\": [{\"device\": 3}]}".to_vec(), "invalid type"),
    ];
    for (n, (bad, says)) in damaged.iter().enumerate() {
        fs::write(&path, bad).unwrap();
        let e = Table::read(&path).unwrap_err();
        assert!(matches!(e, Error::Format { .. }) && e.to_string().contains(says), "{e}");
        check(&path).unwrap();
        let c = TuningCache::at(&path);
        assert!(c.table().is_empty());
        let said = c.warnings();
        assert!(said.len() == 1 && said[0].contains("damaged") && said[0].contains(says), "{said:?}");
        // Reading changes nothing.
        assert_eq!(&fs::read(&path).unwrap(), bad);
        c.add(&filled());
        c.save().unwrap();
        // Files that were moved aside earlier are not overwritten.
        for (k, (bad, _)) in damaged[..=n].iter().enumerate() {
            let kept = if k == 0 { "tuning.json.bad".into() } else { format!("tuning.json.bad.{k}") };
            assert_eq!(&fs::read(path.with_file_name(kept)).unwrap(), bad);
        }
        assert!(c.warnings()[0].contains(".bad"));
        assert_eq!(Table::read(&path).unwrap().unwrap().len(), 1);
        assert_eq!(TuningCache::memory().import(&path).unwrap(), 1);
        fs::write(&path, bad).unwrap();
        assert!(matches!(TuningCache::memory().import(&path), Err(Error::Format { .. })));
    }
    // An empty file is not moved aside.
    fs::write(&path, b"").unwrap();
    let c = TuningCache::at(&path);
    c.add(&filled());
    c.save().unwrap();
    assert!(c.warnings()[0].contains("empty"));
    let bad = (1..damaged.len()).map(|n| format!("tuning.json.bad.{n}"));
    let all: Vec<String> = ["tuning.json".to_string(), "tuning.json.bad".into()]
        .into_iter()
        .chain(bad)
        .chain(["tuning.json.lock".into()])
        .collect();
    assert_eq!(names(path.parent().unwrap()), all);
}

#[test]
fn files_of_other_kinds_are_not_modified() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine");
    let newer = text(&Document { format: FORMAT + 1, entries: vec![filled()] });
    for (what, says) in [
        (b"dear diary".as_slice(), "a text file"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a binary file"),
        (b"[1, 2]", "JSON of another kind"),
        (b"{\"format\": 1, \"pages\": []}", "JSON of another kind"),
        (newer.as_bytes(), "of format 2 where this version reads 1"),
    ] {
        fs::write(&path, what).unwrap();
        let c = TuningCache::at(&path);
        c.add(&filled());
        assert!(c.warnings()[0].contains("its content is not used"));
        for e in [
            check(&path).unwrap_err(),
            c.save().unwrap_err(),
            c.clear_rejections("d").unwrap_err(),
            c.guard().unwrap_err(),
            c.recover(RejectReason::Hung, "").unwrap_err(),
            TuningCache::memory().export(&path).unwrap_err(),
        ] {
            assert!(matches!(&e, Error::Format { .. }) && e.to_string().contains(says), "{e}");
        }
        assert_eq!(fs::read(&path).unwrap(), what);
        assert_eq!(names(dir.path()), ["mine"]);
    }
    assert!(matches!(check(dir.path()), Err(Error::Format { .. })));
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_devices_refused() {
    use std::os::unix::fs::{FileTypeExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("real")).unwrap();
    let link = dir.path().join("link");
    symlink("real/tuning.json", &link).unwrap();
    for _ in 0..2 {
        let c = TuningCache::at(&link);
        c.add(&filled());
        c.save().unwrap();
    }
    assert_eq!(names(&dir.path().join("real")), ["tuning.json", "tuning.json.lock"]);
    assert_eq!(names(dir.path()), ["link", "real"]);
    let null = dir.path().join("null");
    symlink("/dev/null", &null).unwrap();
    for device in [&null, Path::new("/dev/zero")] {
        assert!(matches!(check(device), Err(Error::Format { .. })));
        assert!(matches!(TuningCache::at(device).save(), Err(Error::Format { .. })));
        assert!(fs::metadata(device).unwrap().file_type().is_char_device());
    }
}

#[test]
fn a_place_that_cannot_be_written_is_a_typed_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let c = TuningCache::at(file.join("tuning.json"));
    c.add(&Entry { best: Some(best(1, 1)), ..Entry::new("d", "k") });
    assert!(matches!(c.save(), Err(Error::Io { .. })));
    c.save_or_warn();
    assert_eq!(c.tuned_variants("d").len(), 1, "it stays in memory");
    let e = TuningCache::memory().import(&dir.path().join("none")).unwrap_err();
    assert!(e.to_string().contains("no such file"), "{e}");
    // A directory at the file's path.
    assert!(matches!(TuningCache::at(dir.path()).save(), Err(Error::Format { .. })));
}

#[test]
fn writers_at_once_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tuning.json");
    std::thread::scope(|s| {
        for t in 0..4u32 {
            let path = &path;
            s.spawn(move || {
                let c = TuningCache::at(path);
                for k in 0..10 {
                    c.add(&Entry {
                        best: Some(best(t, 1)),
                        ..Entry::new(&format!("d{t}"), &format!("k{k}"))
                    });
                    c.save().unwrap();
                    assert!(Table::read(path).unwrap().is_some(), "a reader sees a whole file");
                }
            });
        }
    });
    assert_eq!(Table::read(&path).unwrap().unwrap().len(), 40);
    let out = dir.path().join("other.json");
    assert_eq!(TuningCache::at(&path).export(&out).unwrap(), 40);
    assert_eq!(TuningCache::at(&out).table(), TuningCache::at(&path).table());
}

#[test]
fn candidates_that_ran_during_a_crash_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tuning.json");
    let c = TuningCache::at(&path);
    let mut alive = c.guard().unwrap().unwrap();
    alive.begin("d", "alive", &variant(1)).unwrap();
    let mut done = c.guard().unwrap().unwrap();
    done.begin("d", "done", &variant(2)).unwrap();
    done.end().unwrap();
    // The state after a crash: the files exist and are not locked.
    let mut dead = c.guard().unwrap().unwrap();
    dead.begin("d", "dead", &variant(3)).unwrap();
    for g in [&dead, &done] {
        g.file.unlock().unwrap();
    }
    let found = TuningCache::at(&path).recover(RejectReason::Crashed, "it ended").unwrap();
    let [(key, r)] = &found[..] else { panic!("{found:?}") };
    assert_eq!((&**key, r.why, &r.variant), ("dead", RejectReason::Crashed, &variant(3)));
    assert_eq!(
        Table::read(&path).unwrap().unwrap().get("d", "dead").unwrap().rejected,
        std::slice::from_ref(r)
    );
    assert!(TuningCache::at(&path).recover(RejectReason::Crashed, "").unwrap().is_empty());
    assert!(alive.path.exists() && !dead.path.exists() && !done.path.exists());
    drop(alive);
    assert!(TuningCache::at(&path).recover(RejectReason::Crashed, "").unwrap().is_empty());
}

#[test]
fn modes_have_names() {
    for m in [
        TuningMode::Off,
        TuningMode::Cached,
        TuningMode::Background,
        TuningMode::Exhaustive,
        TuningMode::Budget(Duration::from_millis(2500)),
    ] {
        assert_eq!(m.to_string().parse::<TuningMode>().unwrap(), m);
    }
    for bad in ["", "on", "-1", "nan", "1e400"] {
        assert_eq!(bad.parse::<TuningMode>().unwrap_err().exit_code(), 2, "{bad}");
    }
}
