//! A folder of images, with one sub-folder per class.

use crate::dataset::{Column, Dataset, check_rows};
use crate::{bad, resize};
use halcyon_formats::picture::{self, Failure};
use halcyon_host::input;
use halcyon_ir::{ConstData, DType, Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file name extensions of images, in lower case. Other files are skipped.
const EXTENSIONS: &[&str] =
    &["bmp", "j2k", "jp2", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"];
/// The limits of an image: pixels, decoded bytes, and bytes of the file.
const MAX_PIXELS: usize = 100 << 20;
const MAX_BYTES: usize = 512 << 20;
const MAX_FILE: u64 = 256 << 20;
/// The largest width or height that images are resized to.
const MAX_SIDE: usize = 16_384;

/// How [`ImageFolder`] reads images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageOptions {
    pub width: usize,
    pub height: usize,
    /// 1 for grey, 3 for red, green and blue.
    pub channels: usize,
    /// The names of the sub-folders, in the order of their class numbers. If empty, all sub-folders, sorted
    /// by name. For a test folder that may lack some classes, pass the classes of the training folder.
    pub classes: Vec<String>,
}

impl ImageOptions {
    /// Options for colour images of this size in pixels.
    pub fn new(width: usize, height: usize) -> ImageOptions {
        ImageOptions { width, height, channels: 3, classes: vec![] }
    }

    pub fn grey(mut self) -> ImageOptions {
        self.channels = 1;
        self
    }

    pub fn classes(mut self, classes: Vec<String>) -> ImageOptions {
        self.classes = classes;
        self
    }
}

/// Images in sub-folders. A row has `image`, f32 `[channels, height, width]` with values from 0 to 1, and
/// `label`, the i32 number of the sub-folder.
///
/// The threads of the loader decode the images when they are needed. As in `halcyon run`, images are resized
/// with a triangle filter, and grey is the luminance of Rec. 709. Hidden files and folders, and files without
/// the extension of an image, are skipped; symbolic links are followed.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    columns: [Column; 2],
    files: Vec<(PathBuf, i32)>,
    options: ImageOptions,
}

impl ImageFolder {
    /// Lists the images of a folder. They are ordered by class, then by name.
    ///
    /// # Errors
    /// [`Error::Argument`] for invalid options; [`Error::Io`]; [`Error::Format`] if there is no sub-folder, a
    /// sub-folder has no image or contains folders, or the name of a sub-folder is not text or not one of the
    /// classes.
    pub fn open(dir: &Path, options: ImageOptions) -> Result<ImageFolder> {
        check(&options)?;
        let place = dir.display().to_string();
        let mut folders = vec![];
        for path in list(dir)?.into_iter().filter(|p| p.is_dir()) {
            let name = path.file_name().and_then(|n| n.to_str()).map(str::to_string);
            let name = name.ok_or_else(|| bad(&place, format!("the name of {path:?} is not text")))?;
            folders.push((name, path));
        }
        if folders.is_empty() {
            return Err(bad(&place, "the folder has no sub-folders; put the images of each class into one"));
        }
        let classes = match &options.classes[..] {
            [] => folders.iter().map(|(name, _)| name.clone()).collect(),
            given => given.to_vec(),
        };
        let mut files = vec![];
        for (name, path) in folders {
            let class = classes.iter().position(|c| *c == name).and_then(|k| i32::try_from(k).ok());
            let class = class.ok_or_else(|| {
                bad(
                    &place,
                    format!("the sub-folder '{name}' is not one of the classes {}", classes.join(", ")),
                )
            })?;
            let images = images(&path)?;
            files.extend(images.into_iter().map(|p| (p, class)));
        }
        files.sort_by_key(|(_, class)| *class);
        let image = Column::new("image", DType::F32, &[options.channels, options.height, options.width]);
        let label = Column::new("label", DType::I32, &[]).with_classes(classes);
        Ok(ImageFolder { columns: [image, label], files, options })
    }

    /// The file of a row; `None` if there is no such row.
    pub fn file(&self, row: usize) -> Option<&Path> {
        self.files.get(row).map(|(path, _)| path.as_path())
    }
}

fn check(o: &ImageOptions) -> Result<()> {
    let bad = |what: String| Err(Error::argument("images", what));
    if let Some(n) = [o.width, o.height].into_iter().find(|n| !(1..=MAX_SIDE).contains(n)) {
        return bad(format!("{n} is not a width or height; sizes are from 1 to {MAX_SIDE}"));
    }
    if ![1, 3].contains(&o.channels) {
        return bad(format!("{} channels; write 1 for grey or 3 for colour", o.channels));
    }
    match o.classes.iter().enumerate().find(|(k, c)| o.classes[..*k].contains(c)) {
        Some((_, class)) => bad(format!("the class '{class}' appears twice")),
        None => Ok(()),
    }
}

/// The entries of a folder, without hidden files, sorted by name.
fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let io = |e: std::io::Error| Error::Io { path: dir.display().to_string(), what: e.to_string() };
    let mut all = vec![];
    for entry in fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            all.push(entry.path());
        }
    }
    all.sort();
    Ok(all)
}

/// The images of a sub-folder.
fn images(dir: &Path) -> Result<Vec<PathBuf>> {
    let place = dir.display().to_string();
    let mut all = vec![];
    for path in list(dir)? {
        let extension = path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase);
        if path.is_dir() {
            return Err(bad(
                &place,
                format!("the class has a folder, {path:?}; put its images into the class itself"),
            ));
        }
        if extension.is_some_and(|e| EXTENSIONS.contains(&e.as_str())) {
            all.push(path);
        }
    }
    match all.is_empty() {
        true => Err(bad(
            &place,
            format!("the folder of this class has no image; images end in {}", EXTENSIONS.join(", ")),
        )),
        false => Ok(all),
    }
}

/// Decodes a file. An image that is too large is rejected before memory is allocated for it.
fn decode(path: &Path, options: &ImageOptions) -> Result<Vec<f32>> {
    let file = path.display().to_string();
    let content = input::bytes(path, MAX_FILE).map_err(|e| e.error(path))?;
    // A lack of memory. It is kept here, because the decoder's errors cannot express it.
    let mut lacking = None;
    let decoded = picture::decode_samples(&content, &mut |h| {
        let (pixels, bytes) = (h.width.saturating_mul(h.height), h.bytes());
        if pixels > MAX_PIXELS || bytes > MAX_BYTES {
            let size = format!("an image of {}x{}, which takes {bytes} bytes", h.width, h.height);
            let what = format!("{size}; the limits are {MAX_PIXELS} pixels and {MAX_BYTES} bytes");
            return Err(Failure::Unsupported(what));
        }
        if bytes < MAX_PIXELS {
            return Ok(());
        }
        let floats = pixels as u64 * 12;
        halcyon_host::check_available(bytes as u64 + floats, &format!("the image {file}")).map_err(|e| {
            lacking = Some(e);
            Failure::Unsupported("too little memory".into())
        })
    });
    match (lacking, decoded) {
        (Some(e), _) => Err(e),
        (None, Ok(image)) => resize::planes(image, options.channels, (options.width, options.height), &file),
        (None, Err(Failure::Corrupt(what) | Failure::Unsupported(what))) => Err(bad(&file, what)),
    }
}

impl Dataset for ImageFolder {
    fn len(&self) -> usize {
        self.files.len()
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn row(&self, row: usize) -> Result<Vec<ConstData>> {
        check_rows(&[row], self.len())?;
        let (path, class) = &self.files[row];
        let values = decode(path, &self.options)?;
        let mut bytes = vec![0; values.len() * 4];
        bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes());
        let image = ConstData::new(DType::F32, &self.columns[0].dims, Arc::new(bytes))?;
        Ok(vec![image, ConstData::from_slice(&[], &[*class])?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ppm(rgb: [u8; 3]) -> Vec<u8> {
        [&b"P6 1 1 255\n"[..], &rgb].concat()
    }

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        dir
    }

    fn text(dir: &Path, options: ImageOptions) -> String {
        match ImageFolder::open(dir, options) {
            Err(e @ (Error::Format { .. } | Error::Io { .. } | Error::Argument { .. })) => e.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sub_folders_are_classes_in_the_order_of_their_names() {
        let (red, green, blue) = (ppm([255, 0, 0]), ppm([0, 255, 0]), ppm([0, 0, 255]));
        let dir = folder(&[
            ("cat/2.ppm", &red),
            ("cat/10.PPM", &green),
            ("cat/notes.txt", b"no image"),
            ("cat/.hidden.ppm", b""),
            (".git/x.ppm", b""),
            ("bird/1.ppm", &blue),
            ("readme", b""),
        ]);
        let data = ImageFolder::open(dir.path(), ImageOptions::new(1, 1)).unwrap();
        assert_eq!(data.columns[1].classes[..], ["bird", "cat"]);
        let names: Vec<_> = (0..3).map(|k| data.file(k).unwrap().file_name().unwrap().to_owned()).collect();
        assert_eq!(names, ["1.ppm", "10.PPM", "2.ppm"]);
        if cfg!(feature = "images") {
            let batch = data.batch(&[0, 2, 1]).unwrap();
            assert_eq!(batch[0].dims[..], [3, 3, 1, 1]);
            assert_eq!(batch[0].to_vec::<f32>(), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
            assert_eq!(batch[1].to_vec::<i32>(), [0, 1, 1]);
        }
        let three = ["dog", "cat", "bird"].map(String::from).to_vec();
        let data = ImageFolder::open(dir.path(), ImageOptions::new(2, 3).grey().classes(three)).unwrap();
        assert_eq!(
            (data.columns[0].dims.as_slice(), data.files[0].1, data.files[2].1),
            (&[1, 3, 2][..], 1, 2)
        );
        assert!(matches!(data.row(3), Err(Error::Argument { .. })));
    }

    #[test]
    fn folders_that_are_no_dataset() {
        let one = ImageOptions::new(1, 1);
        let dir = folder(&[("a/1.ppm", &ppm([1, 2, 3])), ("b/x.txt", b"")]);
        assert!(text(dir.path(), one.clone()).contains("b: the folder of this class has no image"));
        assert!(text(&dir.path().join("a"), one.clone()).contains("no sub-folders"));
        assert!(text(&dir.path().join("none"), one.clone()).contains("none"));
        let dir = folder(&[("a/b/1.ppm", &ppm([1, 2, 3]))]);
        assert!(text(dir.path(), one.clone()).contains("the class has a folder"));
        let other = one.clone().classes(vec!["x".into(), "y".into()]);
        assert!(text(dir.path(), other).contains("'a' is not one of the classes x, y"));
        assert!(text(dir.path(), one.clone().classes(vec!["x".into(), "x".into()])).contains("twice"));
        assert!(text(dir.path(), ImageOptions::new(0, 1)).contains("0 is not a width"));
        assert!(text(dir.path(), ImageOptions { channels: 4, ..one }).contains("4 channels"));
    }

    #[test]
    fn damaged_images_are_errors_that_name_the_file() {
        let big = b"P6 99999 99999 255\nx".to_vec();
        let dir =
            folder(&[("a/1.ppm", b"P6 2 2 255\nx"), ("a/2.png", b"\x89PNG\r\n\x1a\n"), ("a/3.ppm", &big)]);
        let data = ImageFolder::open(dir.path(), ImageOptions::new(4, 4)).unwrap();
        for (row, name) in ["1.ppm", "2.png", "3.ppm"].iter().enumerate() {
            let e = data.batch(&[row]).unwrap_err();
            assert!(matches!(e, Error::Format { .. }) && e.to_string().contains(name), "{e}");
        }
    }
}
