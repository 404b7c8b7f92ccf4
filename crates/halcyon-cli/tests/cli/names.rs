//! Tests of names that come from outside: file names (which may be invalid Unicode), names in a model (which
//! may contain any character), and paths in environment variables.

use crate::common::*;
use halcyon_ir::DType;
use std::fs;
use std::path::Path;

const DIGITS: &str = "models/digits.onnx";

#[cfg(unix)]
#[test]
fn paths_need_not_be_text() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().expect("a folder");
    let odd = dir.path().join(OsStr::from_bytes(b"m\xff\x1b[31m.onnx"));
    fs::copy(root().join(DIGITS), &odd).expect("the model is copied");
    let run = |before: &[&str], after: &[&str]| {
        let mut c = command(before);
        c.arg(&odd).args(after).env("HALCYON_CACHE", "off");
        finish(&mut c)
    };
    let cpu = ["--backend", "cpu"];
    for (before, after) in [
        (&["run"][..], &["-i", "ones"][..]),
        (&["inspect"], &[]),
        (&["select"], &[]),
        (&["fit"], &[]),
        (&["trace"], &[]),
        (&["bench", "model"], &["--repeat", "1"]),
        (&["bench", "receipts"], &["--repeat", "1"]),
        (&["prepare"], &["--repeat", "1"]),
    ] {
        let done = run(before, &[&cpu, after, &["--json"]].concat()).ok();
        let v = done.json();
        let file = v["model"].as_str().or(v["file"].as_str()).unwrap_or_default();
        assert!(file.contains('\u{fffd}'), "{before:?}: {file}");
        let text = run(before, &[&cpu, after].concat()).ok();
        assert!(!text.out.contains('\x1b'), "{before:?}: {text:?}");
    }
    // A name that is not Unicode is accepted for an output, and an error about a missing file can contain it.
    let to = dir.path().join(OsStr::from_bytes(b"out\xfe.onnx"));
    let mut c = command(&["export", DIGITS, "--json", "-o"]);
    assert!(finish(c.arg(&to)).ok().json()["output"].is_string());
    assert!(to.is_file());
    let mut c = command(&["run", "--json"]);
    let none = finish(c.arg(dir.path().join(OsStr::from_bytes(b"none\xfd.onnx"))));
    assert_eq!((none.code, none.json()["error"]["kind"].as_str()), (1, Some("Io")));
}

#[test]
fn names_in_a_model_cannot_add_lines() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.onnx");
    let odd = "x\nwarning  forged\u{1b}[31m\u{202e}";
    let mut m =
        model("Neg", "", vec![port(odd, DType::F32, &[Ok(2)])], port("y\nforged", DType::F32, &[Ok(2)]));
    m.graph.as_mut().expect("a graph").node[0].name = "n\nforged".into();
    save(&m, &path);
    let cpu = ["--backend", "cpu"];
    for args in [
        &["run", text(&path), "-i", "ones"][..],
        &["run", text(&path)],
        &["run", text(&path), "-i", "zeros:3"],
        &["run", text(&path), "-i", "nothing=zeros"],
        &["inspect", text(&path)],
        &["fit", text(&path)],
        &["select", text(&path)],
        &["trace", text(&path)],
    ] {
        let done = halcyon(&[args, &cpu].concat());
        for text in [&done.out, &done.err] {
            let forged = text
                .lines()
                .find(|l| l.trim_start().starts_with("forged") || l.starts_with("warning  forged"));
            assert!(forged.is_none() && !text.contains(['\x1b', '\u{202e}']), "{args:?}: {done:?}");
        }
        // `select` does not print tensor names.
        let named = done.out.contains("\\n") || done.err.contains("\\n");
        assert!(named || args[0] == "select", "{args:?}: {done:?}");
    }
    // JSON contains names unchanged.
    let v = halcyon(&["run", text(&path), "-i", "ones", "--backend", "cpu", "--json"]).ok().json();
    assert_eq!((&v["inputs"][0]["name"], &v["outputs"][0]["name"]), (&odd.into(), &"y\nforged".into()));
    // An unknown operator has such a name, which the importer's error contains.
    let mut wrong = m.clone();
    wrong.graph.as_mut().expect("a graph").node[0].op_type = "No\nforged".into();
    save(&wrong, &path);
    for command in ["run", "inspect"] {
        let done = halcyon(&[command, text(&path), "-i", "ones", "--backend", "cpu"]);
        assert!(!done.err.lines().chain(done.out.lines()).any(|l| l.starts_with("forged")), "{done:?}");
    }
}

#[test]
fn a_blank_picture_is_taken() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("blank.png");
    let mut encoder = png::Encoder::new(fs::File::create(&path).expect("a file"), 8000, 6000);
    encoder.set_color(png::ColorType::Grayscale);
    let mut writer = encoder.write_header().expect("a header");
    writer.write_image_data(&vec![255; 8000 * 6000]).expect("the picture is written");
    writer.finish().expect("the picture is written");
    assert!(fs::metadata(&path).expect("the picture").len() < 400_000);
    halcyon(&["run", DIGITS, "-i", text(&path), "--backend", "cpu"]).ok();
    // A header that claims more pixels than allowed is rejected before they are allocated.
    let mut png = fs::read(&path).expect("the picture");
    png[16..20].copy_from_slice(&60_000u32.to_be_bytes());
    png[20..24].copy_from_slice(&60_000u32.to_be_bytes());
    let mut crc = flate2::Crc::new();
    crc.update(&png[12..29]);
    png[29..33].copy_from_slice(&crc.sum().to_be_bytes());
    fs::write(&path, png).expect("a file");
    halcyon(&["run", DIGITS, "-i", text(&path), "--backend", "cpu"]).fails(1, &["60000x60000"]);
}

#[test]
fn images_of_other_formats_are_taken() {
    let dir = tempfile::tempdir().expect("a folder");
    let answer = |path: &std::path::Path| {
        let v =
            halcyon(&["run", DIGITS, "-i", text(path), "--backend", "cpu", "--json", "--top-k", "1"]).ok();
        v.json()["top_k"]["rows"][0][0]["index"].clone()
    };
    // The pixels of the sample, as PGM and as BMP with a grey palette.
    let sample = fs::File::open(root().join("models/digit-7.png")).expect("the sample");
    let mut reader = png::Decoder::new(std::io::BufReader::new(sample)).read_info().expect("a header");
    let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
    let frame = reader.next_frame(&mut pixels).expect("pixels");
    assert_eq!((frame.width, frame.height, frame.color_type), (8, 8, png::ColorType::Grayscale));
    let pgm = dir.path().join("seven.pgm");
    fs::write(&pgm, [b"P5 8 8 255\n", &pixels[..64]].concat()).expect("a file");
    assert_eq!(answer(&pgm), 7);
    let mut bmp = b"BM".to_vec();
    bmp.extend(
        [[0u32, 0, 54 + 1024, 40, 8, 8, 1 | 8 << 16, 0, 0, 0, 0, 0, 0].map(u32::to_le_bytes)]
            .as_flattened()
            .as_flattened(),
    );
    bmp.extend((0..=255u8).flat_map(|v| [v, v, v, 0]));
    bmp.extend(pixels[..64].chunks_exact(8).rev().flatten());
    let path = dir.path().join("seven.bmp");
    fs::write(&path, &bmp).expect("a file");
    assert_eq!(answer(&path), 7);
    // A damaged image.
    fs::write(&path, &bmp[..200]).expect("a file");
    halcyon(&["run", DIGITS, "-i", text(&path), "--backend", "cpu"]).fails(1, &["seven.bmp", "BMP"]);
}

#[test]
fn errors_name_the_wrong_option() {
    let run = |more: &[&str]| {
        let picture = ["run", DIGITS, "-i", "models/digit-7.png", "--backend", "cpu"];
        halcyon(&[&picture, more].concat())
    };
    let mean = run(&["--image-mean", "nan"]).fails(2, &["--image-mean: NaN"]);
    assert!(!mean.err.contains("--image-std"), "{mean:?}");
    run(&["--image-std", "0"]).fails(2, &["--image-std: 0"]);
}

#[test]
fn invalid_variables_and_endless_files_are_errors() {
    let run = |variable: &str, value: &str| {
        let mut c = command(&["run", DIGITS, "-i", "ones", "--backend", "cpu"]);
        finish(c.env(variable, value))
    };
    run("HALCYON_CACHE", "garbage").fails(2, &["HALCYON_CACHE", "\"garbage\"", "off", "programs", "packed"]);
    for good in ["", "off", "OFF", "programs", "packed"] {
        let dir = tempfile::tempdir().expect("a folder");
        let mut c = command(&["run", DIGITS, "-i", "ones", "--backend", "cpu"]);
        finish(c.env("HALCYON_CACHE", good).env("XDG_CACHE_HOME", dir.path())).ok();
    }
    if Path::new("/dev/zero").exists() {
        run("HALCYON_CONFIG", "/dev/zero").fails(1, &["/dev/zero: more than"]);
        let labels =
            ["run", DIGITS, "-i", "ones", "--backend", "cpu", "--top-k", "1", "--labels", "/dev/zero"];
        halcyon(&labels).fails(1, &["/dev/zero: more than"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn relative_homes_make_no_folders() {
    let dir = tempfile::tempdir().expect("a folder");
    let home = |args: &[&str]| {
        let mut c = command(args);
        c.current_dir(dir.path())
            .env("HOME", "home")
            .env("XDG_CACHE_HOME", "cache")
            .env_remove("HALCYON_CACHE");
        finish(&mut c)
    };
    let (model, picture) = (root().join(DIGITS), root().join("models/digit-7.png"));
    home(&["devices"]).ok();
    let devices = halcyon(&["devices", "--json"]).ok().json();
    for d in devices.as_array().into_iter().flatten().filter(|d| d["available"] == true) {
        home(&["run", text(&model), "-i", text(&picture), "--backend", d["id"].as_str().unwrap_or("cpu")]);
    }
    let left: Vec<_> =
        fs::read_dir(dir.path()).expect("the folder").flatten().map(|e| e.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    // The log says that the setting is ignored.
    let mut c = command(&["run", text(&model), "-i", text(&picture), "--backend", "cpu"]);
    c.current_dir(dir.path())
        .env("XDG_CACHE_HOME", "cache")
        .env("HALCYON_LOG", "info")
        .env_remove("HALCYON_CACHE");
    let log = finish(&mut c).ok();
    assert!(
        log.err.contains("a relative folder is ignored") && log.err.contains("XDG_CACHE_HOME"),
        "{log:?}"
    );
    // Without a home, doctor names the missing variables and no others.
    let mut c = command(&["doctor", "--backend", "cpu"]);
    c.env_remove("HOME").env_remove("XDG_CACHE_HOME").env_remove("HALCYON_CACHE");
    let doctor = finish(&mut c);
    assert!(doctor.out.contains("XDG_CACHE_HOME is not set and HOME is not set"), "{doctor:?}");
    assert!(!doctor.out.contains("(HALCYON_CACHE)"), "{doctor:?}");
}

#[test]
fn the_log_tells_what_was_done() {
    let mut c = command(&["run", DIGITS, "-i", "ones", "--backend", "cpu"]);
    let done = finish(c.env("HALCYON_LOG", "info")).ok();
    for part in ["device chosen", "cpu", "plan made", "steps"] {
        assert!(done.err.contains(part), "{part}: {done:?}");
    }
    assert_eq!(done.err.matches("plan made").count(), 1, "{done:?}");
}
