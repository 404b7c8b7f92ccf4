//! Files of weights: safetensors files whose tensors have the same names as in PyTorch, and PyTorch's own
//! files, which are only read.

use crate::module::{Module, ModuleExt, Unmatched};
use crate::slot::{Slot, backend_of, dtype_of};
use halcyon::ConstData;
use halcyon::Tensor;
use halcyon::ir::error::{Error, Result};
use halcyon_formats::safetensors::{self, SafeTensors};
use halcyon_formats::torch::TorchFile;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// How loading treats names without a counterpart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// Names without a counterpart are an error.
    #[default]
    Strict,
    /// Names without a counterpart are returned.
    Lenient,
}

/// Saving and loading the weights of a module.
pub trait LoadWeights: Module {
    /// Parameters and buffers by name, on the host, without the buffers made by [`crate::Buffer::transient`].
    /// A shared parameter or buffer appears under each of its names.
    ///
    /// # Errors
    /// Errors of the device.
    fn state_dict(&self) -> Result<Vec<(String, ConstData)>> {
        let mut slots: Vec<(String, Slot)> = vec![];
        self.each_slot(|path, slot| {
            if slot.is_saved() {
                slots.push((path.to_string(), slot.clone()));
            }
        });
        slots.into_iter().map(|(path, slot)| Ok((path, slot.stored().to_data()?))).collect()
    }

    /// Replaces parameters and buffers by tensors of the same names and shapes; dtypes are converted. `names`
    /// lists the names of all given tensors, and `get` returns the tensor of a name, or `None`. Returns the
    /// names without a counterpart. If there is an error, nothing is replaced.
    ///
    /// # Errors
    /// `Error::Argument` for names without a counterpart, if `strictness` is [`Strictness::Strict`];
    /// `Error::Shape` for a tensor of another shape, with its name; errors of `get` and of the device.
    fn load_state_dict(
        &self,
        get: &dyn Fn(&str) -> Option<Result<ConstData>>,
        names: &[String],
        strictness: Strictness,
    ) -> Result<Unmatched> {
        let (mut unmatched, mut new) = (Unmatched::default(), vec![]);
        let mut known: HashSet<String> = HashSet::new();
        let mut slots = vec![];
        self.each_slot(|path, slot| slots.push((path.to_string(), slot.clone())));
        for (path, slot) in slots {
            if !slot.is_saved() {
                continue;
            }
            known.insert(path.clone());
            match get(&path) {
                Some(data) => {
                    let value = converted(&path, &slot, &data?)?;
                    new.push((slot, value));
                }
                // The name may be removed again below: a slot that several fields share needs only one of its
                // names.
                None => unmatched.missing.push(path),
            }
        }
        let loaded: HashSet<_> = new.iter().map(|(s, _)| s.id()).collect();
        self.each_slot(|path, slot| {
            if loaded.contains(&slot.id()) {
                unmatched.missing.retain(|m| m != path);
            }
        });
        unmatched.unexpected = names.iter().filter(|n| !known.contains(*n)).cloned().collect();
        if strictness == Strictness::Strict && unmatched != Unmatched::default() {
            return Err(Error::argument("load", unmatched.to_string()));
        }
        halcyon::eval(&new.iter().map(|(_, t)| t.clone()).collect::<Vec<_>>())?;
        new.into_iter().try_for_each(|(s, t)| s.replace(t))?;
        Ok(unmatched)
    }

    /// Writes parameters and buffers to a safetensors file. An existing file is replaced when the new file is
    /// complete. Returns the size of the new file in bytes.
    ///
    /// # Errors
    /// `Error::Io`, and errors of the device.
    fn save(&self, path: &Path) -> Result<u64> {
        let tensors = self.state_dict()?;
        let refs: Vec<(&str, &ConstData)> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
        safetensors::write(path, &refs, &BTreeMap::from([("format".to_string(), "pt".to_string())]))
    }

    /// Reads parameters and buffers from a safetensors file; see [`LoadWeights::load_state_dict`].
    ///
    /// # Errors
    /// Those of [`LoadWeights::load_state_dict`]; `Error::Io`; `Error::Format` for a malformed file.
    fn load(&self, path: &Path, strictness: Strictness) -> Result<Unmatched> {
        let file = SafeTensors::open(path)?;
        let names: Vec<String> = file.names().map(str::to_string).collect();
        let has: HashSet<&str> = names.iter().map(String::as_str).collect();
        self.load_state_dict(&|n| has.contains(n).then(|| file.get(n)), &names, strictness)
    }

    /// Reads parameters and buffers from a PyTorch file (`.pt`, `.pth`), without running the code in its
    /// pickle. If the names of the model are inside of a dict of the file, such as `model` or `state_dict`,
    /// or begin with `module.`, only that part of the file is read.
    ///
    /// # Errors
    /// Those of [`LoadWeights::load_state_dict`] and of [`TorchFile::open`].
    fn load_torch(&self, path: &Path, strictness: Strictness) -> Result<Unmatched> {
        let file = TorchFile::open(path)?;
        let mut own = vec![];
        self.each_slot(|path, slot| {
            if slot.is_saved() {
                own.push(path.to_string());
            }
        });
        let all: HashSet<&str> = file.names().collect();
        let found =
            |prefix: &str| own.iter().filter(|n| all.contains(format!("{prefix}{n}").as_str())).count();
        let mut prefixes: Vec<&str> = own.first().map_or(vec![], |first| {
            let before = all.iter().filter_map(|n| n.strip_suffix(first.as_str()));
            before.filter(|p| p.is_empty() || p.ends_with('.')).collect()
        });
        // The name is the last criterion, so that the choice is the same in every run.
        prefixes.sort_by_key(|p| (std::cmp::Reverse(found(p)), p.len(), *p));
        let prefix = prefixes.first().copied().unwrap_or_default();
        let names: Vec<String> =
            file.names().filter_map(|n| n.strip_prefix(prefix)).map(str::to_string).collect();
        let get = |n: &str| {
            let name = format!("{prefix}{n}");
            all.contains(name.as_str()).then(|| file.get(&name))
        };
        self.load_state_dict(&get, &names, strictness)
    }
}

impl<M: Module + ?Sized> LoadWeights for M {}

/// Converts a tensor of a file to the dtype of a slot, on the slot's device.
fn converted(path: &str, slot: &Slot, data: &ConstData) -> Result<Tensor> {
    let want = slot.stored().dims()?;
    if data.dims[..] != want[..] {
        let what =
            format!("the file's tensor is {:?}, but the model's is {:?}", &data.dims[..], want.as_slice());
        return Err(Error::shape(format!("load `{path}`"), what));
    }
    Ok(Tensor::from_data(&backend_of(slot), data)?.cast(dtype_of(slot)?))
}

impl std::fmt::Display for Unmatched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        /// The largest number of names that are listed.
        const MOST: usize = 8;
        let list = |f: &mut std::fmt::Formatter<'_>, what: &str, names: &[String]| {
            let shown = names[..names.len().min(MOST)].join("`, `");
            let more = names.len().saturating_sub(MOST);
            write!(f, "{what} `{shown}`")?;
            if more > 0 { write!(f, " and {more} more") } else { Ok(()) }
        };
        match (self.missing.is_empty(), self.unexpected.is_empty()) {
            (true, true) => f.write_str("all names match"),
            (false, true) => list(f, "the file lacks", &self.missing),
            (true, false) => list(f, "the model lacks", &self.unexpected),
            (false, false) => {
                list(f, "the file lacks", &self.missing)?;
                list(f, "; the model lacks", &self.unexpected)
            }
        }
    }
}
