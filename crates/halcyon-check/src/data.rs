//! The data file holds the names and contents of files, compressed together. Weights that are too large for
//! the data file are generated when it is unpacked.

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use halcyon::host::output::Output;
use serde::Deserialize;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Component, Path, PathBuf};

const MAGIC: &[u8; 16] = b"halcyon-check 1\n";
/// Maximum lengths of a file's name and of its content, far above the actual sizes.
const MAX_NAME: u32 = 4096;
const MAX_CONTENT: u64 = 1 << 30;

type Done<T> = Result<T, String>;

fn at(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    move |e| format!("{}: {e}", path.display())
}

/// `__pack LIST OUT`: each line of the list holds a name, a tab, and the path of the file with the content.
pub(crate) fn pack_listed(args: &[String]) -> Done<()> {
    let [list, out] = args else { return Err("__pack takes a list and a file to write".into()) };
    let text = std::fs::read_to_string(list).map_err(at(Path::new(list)))?;
    let mut files = vec![];
    for line in text.lines() {
        let (name, path) = line.split_once('\t').ok_or_else(|| format!("{list}: no tab in \"{line}\""))?;
        files.push((name.to_string(), PathBuf::from(path)));
    }
    pack(&files, Path::new(out))
}

fn pack(files: &[(String, PathBuf)], out: &Path) -> Done<()> {
    let mut w = Output::create(out).map_err(|e| e.to_string())?;
    w.write_all(MAGIC).map_err(at(out))?;
    let mut z = ZlibEncoder::new(w, Compression::best());
    for (name, path) in files {
        let content = std::fs::read(path).map_err(at(path))?;
        let mut put = |b: &[u8]| z.write_all(b).map_err(at(out));
        put(&(name.len() as u32).to_le_bytes())?;
        put(name.as_bytes())?;
        put(&(content.len() as u64).to_le_bytes())?;
        put(&content)?;
    }
    z.finish().map_err(at(out))?.finish().map(drop).map_err(|e| e.to_string())
}

/// Unpacks a data file into a folder, and generates the weights described in its `weights.json` files.
/// Returns the number of files.
pub(crate) fn unpack(file: &Path, to: &Path) -> Done<usize> {
    let mut r = BufReader::new(File::open(file).map_err(at(file))?);
    let mut magic = [0; 16];
    r.read_exact(&mut magic).map_err(at(file))?;
    if &magic != MAGIC {
        return Err(format!("{}: not a data file of this program", file.display()));
    }
    let mut z = ZlibDecoder::new(r);
    let mut count = 0;
    loop {
        let mut n = [0; 4];
        match z.read(&mut n[..1]).map_err(at(file))? {
            0 => break,
            _ => z.read_exact(&mut n[1..]).map_err(at(file))?,
        }
        let n = u32::from_le_bytes(n);
        if n == 0 || n > MAX_NAME {
            return Err(format!("{}: a file name has {n} bytes, expected 1 to {MAX_NAME}", file.display()));
        }
        let mut name = vec![0; n as usize];
        z.read_exact(&mut name).map_err(at(file))?;
        let name =
            String::from_utf8(name).map_err(|_| format!("{}: a file name is not UTF-8", file.display()))?;
        let path = Path::new(&name);
        if !path.components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(format!("{}: \"{name}\" is a path outside the folder", file.display()));
        }
        let mut n = [0; 8];
        z.read_exact(&mut n).map_err(at(file))?;
        let n = u64::from_le_bytes(n);
        if n > MAX_CONTENT {
            return Err(format!("{}: \"{name}\" has {n} bytes, more than {MAX_CONTENT}", file.display()));
        }
        let path = to.join(path);
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(at(dir))?;
        }
        let mut content = vec![];
        if z.by_ref().take(n).read_to_end(&mut content).map_err(at(file))? as u64 != n {
            return Err(format!("{}: \"{name}\" is cut off", file.display()));
        }
        std::fs::write(&path, content).map_err(at(&path))?;
        if path.file_name().is_some_and(|f| f == "weights.json") {
            generate(&path)?;
        }
        count += 1;
    }
    Ok(count)
}

/// Uniformly distributed f32 numbers at an offset (in bytes) of a weights file.
#[derive(Debug, Deserialize)]
struct RandomWeights {
    offset: u64,
    count: u64,
    seed: u32,
    low: f64,
    high: f64,
}

#[derive(Debug, Deserialize)]
struct Weights {
    file: String,
    bytes: u64,
    tensors: Vec<RandomWeights>,
}

/// Random number `i` of a seed, in [0, 1): 24 bits of a mixed counter (Steele, Lea and Flood 2014, with 32
/// bits). `xtask/scripts/gen_check.py` uses the same formula.
fn unit(seed: u32, i: u32) -> f64 {
    let mut x = i.wrapping_mul(0x9E37_79B9).wrapping_add(seed.wrapping_mul(0x85EB_CA6B));
    x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^= x >> 16;
    (x >> 8) as f64 / (1u32 << 24) as f64
}

fn generate(list: &Path) -> Done<()> {
    let text = std::fs::read_to_string(list).map_err(at(list))?;
    let w: Weights = serde_json::from_str(&text).map_err(|e| format!("{}: {e}", list.display()))?;
    if w.bytes > MAX_CONTENT || Path::new(&w.file).components().count() != 1 {
        return Err(format!(
            "{}: the weights file \"{}\" of {} bytes must have a name without folders and at most {MAX_CONTENT} bytes",
            list.display(),
            w.file,
            w.bytes
        ));
    }
    let mut bytes = vec![0; w.bytes as usize];
    for t in &w.tensors {
        let range =
            t.count.checked_mul(4).and_then(|n| Some(t.offset as usize..t.offset.checked_add(n)? as usize));
        let part = range
            .and_then(|r| bytes.get_mut(r))
            .ok_or_else(|| format!("{}: {t:?} does not lie in the weights file", list.display()))?;
        for (i, b) in part.chunks_exact_mut(4).enumerate() {
            let v = t.low + (t.high - t.low) * unit(t.seed, i as u32);
            b.copy_from_slice(&(v as f32).to_le_bytes());
        }
    }
    let path = list.with_file_name(&w.file);
    std::fs::write(&path, bytes).map_err(at(&path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_back_and_weights_are_generated() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, content: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, content).unwrap();
            path
        };
        let list = r#"{"file": "w.bin", "bytes": 24, "tensors": [{"offset": 8, "count": 3, "seed": 7, "low": -1, "high": 1}]}"#;
        let files = vec![
            ("a/b.txt".to_string(), put("x", b"hello")),
            ("empty".to_string(), put("y", b"")),
            ("m/weights.json".to_string(), put("z", list.as_bytes())),
        ];
        let (packed, out) = (dir.path().join("p.dat"), dir.path().join("out"));
        pack(&files, &packed).unwrap();
        assert_eq!(unpack(&packed, &out).unwrap(), 3);
        assert_eq!(std::fs::read(out.join("a/b.txt")).unwrap(), b"hello");
        assert_eq!(std::fs::read(out.join("empty")).unwrap(), b"");
        let w = std::fs::read(out.join("m/w.bin")).unwrap();
        assert!(w.len() == 24 && w[..8] == [0; 8] && w[20..] == [0; 4]);
        let v: Vec<f32> = w[8..20].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        // The values that numpy computes with the same formula.
        assert_eq!(v, [-0.7439352, -0.2078656, -0.624385]);

        let whole = std::fs::read(&packed).unwrap();
        for (cut, want) in [(10, "failed to fill"), (whole.len() / 2, "")] {
            let e = unpack(&put("cut", &whole[..cut]), &out).unwrap_err();
            assert!(e.contains(want) && e.contains("cut"), "{e}");
        }
        assert!(unpack(&put("other", &[0; 64]), &out).unwrap_err().contains("not a data file"));
        pack(&[("../up".to_string(), put("x", b"1"))], &packed).unwrap();
        assert!(unpack(&packed, &out).unwrap_err().contains("outside"));
    }
}
