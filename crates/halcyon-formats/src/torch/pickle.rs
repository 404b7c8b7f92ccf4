//! A machine for the pickles that `torch.save` writes (opcodes of CPython's pickletools, protocols 2 to 5).
//! It builds values and runs no code: a Python name that is not in the short list of [`global`] is an error.
//!
//! All values are in one arena and refer to each other by number, so a pickle with cycles is freed like any
//! other pickle. Every opcode adds at most one value, except a call that makes an OrderedDict and copies the
//! entries of a list. The number of all copied entries is limited.

use halcyon_ir::DType;
use std::collections::HashMap;

/// One value of the pickle. A `u32` is an index into a list of the [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// A float, or an integer that does not fit into 64 bits. The value is not kept, because no tensor needs
    /// it.
    Number,
    /// A string: the start and the end of its bytes in the pickle.
    Text(u32, u32),
    /// Bytes and sets. The value is not kept, because no tensor needs it.
    Other,
    /// Tuples and lists.
    Items(u32),
    Dict(u32),
    Global(Global),
    Storage(u32),
    Tensor(u32),
}

/// The Python names that the machine accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Global {
    OrderedDict,
    /// `_rebuild_tensor_v2`, and `_rebuild_tensor`, whose arguments are the first arguments of
    /// `_rebuild_tensor_v2`.
    RebuildTensor,
    /// `_rebuild_tensor_v3`, which also has an argument for the element type.
    RebuildTyped,
    RebuildParameter,
    Size,
    /// The class of a storage, with its element type; `None` for an untyped storage.
    Storage(Option<Element>),
    Element(Element),
}

/// An element type of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Element {
    Is(DType),
    /// A complex type, by its name.
    Unsupported(&'static str),
}

/// A storage: the bytes of a member of the archive.
#[derive(Clone, Debug)]
pub(super) struct Storage {
    /// The member's name below `data/`.
    pub(super) key: String,
    pub(super) element: Option<Element>,
    pub(super) numel: u64,
}

/// A tensor: a strided view of a storage.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) storage: u32,
    pub(super) element: Element,
    /// The offset in elements. Strides are in elements too.
    pub(super) offset: u64,
    pub(super) dims: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Arena {
    pub(super) items: Vec<Vec<Value>>,
    pub(super) dicts: Vec<Vec<(Value, Value)>>,
    pub(super) storages: Vec<Storage>,
    pub(super) tensors: Vec<View>,
}

/// Largest rank of a tensor. PyTorch's own bound is the same.
const MAX_RANK: usize = 64;

/// The largest number of entries that are copied from lists to OrderedDicts. Python 2 writes the entries of
/// an OrderedDict as a list.
const MAX_COPIED: usize = 1 << 20;

/// Largest length of a storage's key in bytes. PyTorch's keys are decimal numbers.
const MAX_KEY: usize = 32;

/// The largest sum of the numbers of values on the stack, marks, memo entries, containers, storages and
/// tensors (the entries of containers are not counted). 100,000 tensors need about 3 million. The limit is
/// needed because a compressed pickle can be a thousand times larger than the file.
const MAX_VALUES: usize = 1 << 24;

type Outcome<T> = Result<T, String>;

fn element(name: &str) -> Option<Element> {
    use DType::*;
    Some(Element::Is(match name {
        "float32" => F32,
        "float64" => F64,
        "float16" => F16,
        "bfloat16" => BF16,
        "int64" => I64,
        "int32" => I32,
        "int16" => I16,
        "int8" => I8,
        "uint8" => U8,
        "uint16" => U16,
        "uint32" => U32,
        "uint64" => U64,
        "bool" => Bool,
        "float8_e4m3fn" => F8E4M3FN,
        "float8_e4m3fnuz" => F8E4M3FNUZ,
        "float8_e5m2" => F8E5M2,
        "float8_e5m2fnuz" => F8E5M2FNUZ,
        "float8_e8m0fnu" => F8E8M0,
        "complex64" => return Some(Element::Unsupported("complex64")),
        "complex128" => return Some(Element::Unsupported("complex128")),
        _ => return None,
    }))
}

fn storage_class(name: &str) -> Option<Option<Element>> {
    let named = match name {
        "FloatStorage" => "float32",
        "DoubleStorage" => "float64",
        "HalfStorage" => "float16",
        "BFloat16Storage" => "bfloat16",
        "LongStorage" => "int64",
        "IntStorage" => "int32",
        "ShortStorage" => "int16",
        "CharStorage" => "int8",
        "ByteStorage" => "uint8",
        "BoolStorage" => "bool",
        "ComplexFloatStorage" => "complex64",
        "ComplexDoubleStorage" => "complex128",
        _ => return None,
    };
    Some(element(named))
}

fn global(module: &str, name: &str) -> Outcome<Global> {
    let known = match (module, name) {
        ("collections", "OrderedDict") => Some(Global::OrderedDict),
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Some(Global::RebuildTensor),
        ("torch._utils", "_rebuild_tensor_v3") => Some(Global::RebuildTyped),
        ("torch._utils", "_rebuild_parameter") => Some(Global::RebuildParameter),
        ("torch", "Size") => Some(Global::Size),
        ("torch.storage" | "torch", "UntypedStorage") => Some(Global::Storage(None)),
        ("torch", name) => {
            storage_class(name).map(Global::Storage).or_else(|| element(name).map(Global::Element))
        }
        _ => None,
    };
    known.ok_or_else(|| {
        format!(
            "the Python object {module}.{name} is more than weights, and reading it would run code. Save \
             only tensors: torch.save(model.state_dict(), file)"
        )
    })
}

/// Reads a pickle. Returns its value.
pub(super) fn read(bytes: &[u8]) -> Outcome<(Arena, Value)> {
    let mut m = Machine {
        bytes,
        copied: 0,
        held: 0,
        at: 0,
        stack: vec![],
        marks: vec![],
        memo: HashMap::new(),
        arena: Arena::default(),
    };
    loop {
        let at = m.at;
        let code = m.byte()?;
        if code == b'.' {
            let value = m.pop()?;
            return Ok((m.arena, value));
        }
        m.step(code).map_err(|what| format!("pickle, byte {at}: {what}"))?;
        let a = &m.arena;
        let parts =
            [m.stack.len(), m.memo.len(), m.marks.len(), a.items.len(), a.dicts.len(), a.tensors.len()];
        if parts.iter().sum::<usize>() + a.storages.len() + m.held > MAX_VALUES {
            return Err(format!("pickle, byte {at}: more than {MAX_VALUES} values"));
        }
    }
}

struct Machine<'b> {
    bytes: &'b [u8],
    /// Entries that were copied from lists to dicts.
    copied: usize,
    /// Entries of all lists, tuples and dicts.
    held: usize,
    at: usize,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    arena: Arena,
}

impl Machine<'_> {
    fn take(&mut self, n: u64) -> Outcome<&[u8]> {
        let end = usize::try_from(n).ok().and_then(|n| self.at.checked_add(n));
        let part = end.and_then(|end| self.bytes.get(self.at..end)).ok_or("the pickle is cut short")?;
        self.at += part.len();
        Ok(part)
    }

    fn byte(&mut self) -> Outcome<u8> {
        Ok(self.take(1)?[0])
    }

    /// A little-endian integer of `n` bytes, at most 8.
    fn uint(&mut self, n: u64) -> Outcome<u64> {
        Ok(self.take(n)?.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b)))
    }

    fn pop(&mut self) -> Outcome<Value> {
        // Values below the last mark must stay on the stack.
        let least = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= least {
            return Err("a value is missing".into());
        }
        self.stack.pop().ok_or_else(|| "a value is missing".into())
    }

    fn top(&self) -> Outcome<Value> {
        self.stack.last().copied().ok_or_else(|| "a value is missing".into())
    }

    fn pop_mark(&mut self) -> Outcome<Vec<Value>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    /// A string of `n` bytes.
    fn text(&mut self, n: u64) -> Outcome<Value> {
        let at = self.at;
        std::str::from_utf8(self.take(n)?).map_err(|_| "a string is not UTF-8")?;
        // The casts are safe, because the length of a pickle fits into 32 bits.
        Ok(Value::Text(at as u32, self.at as u32))
    }

    fn str_of(&self, v: Value) -> Outcome<&str> {
        match v {
            Value::Text(from, to) => {
                let bytes = self.bytes.get(from as usize..to as usize).unwrap_or_default();
                std::str::from_utf8(bytes).map_err(|_| "a string is not UTF-8".into())
            }
            _ => Err("a string is expected".into()),
        }
    }

    fn line(&mut self) -> Outcome<Value> {
        let rest = &self.bytes[self.at..];
        let n = rest.iter().position(|b| *b == b'\n').ok_or("the pickle is cut short")?;
        let text = self.text(n as u64)?;
        self.at += 1;
        Ok(text)
    }

    fn items(&mut self, items: Vec<Value>) -> Value {
        self.held += items.len();
        self.arena.items.push(items);
        Value::Items(self.arena.items.len() as u32 - 1)
    }

    fn dict(&mut self, entries: Vec<(Value, Value)>) -> Value {
        self.held += 2 * entries.len();
        self.arena.dicts.push(entries);
        Value::Dict(self.arena.dicts.len() as u32 - 1)
    }

    fn items_of(&self, v: Value) -> Outcome<&[Value]> {
        match v {
            Value::Items(i) => Ok(&self.arena.items[i as usize]),
            _ => Err("a tuple or list is expected".into()),
        }
    }

    fn step(&mut self, code: u8) -> Outcome<()> {
        let value = match code {
            0x80 => {
                let protocol = self.byte()?;
                return match protocol {
                    2..=5 => Ok(()),
                    p => Err(format!("protocol {p} is not one of 2 to 5")),
                };
            }
            0x95 => return self.take(8).map(drop),
            b'(' => {
                self.marks.push(self.stack.len());
                return Ok(());
            }
            b'0' => return self.pop().map(drop),
            b'1' => return self.pop_mark().map(drop),
            b'2' => self.top()?,
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b'J' => Value::Int(i64::from(self.uint(4)? as u32 as i32)),
            b'K' => Value::Int(self.uint(1)? as i64),
            b'M' => Value::Int(self.uint(2)? as i64),
            0x8a => {
                let n = self.uint(1)?;
                self.long(n)?
            }
            0x8b => {
                let n = self.uint(4)?;
                self.long(n)?
            }
            b'G' => {
                self.take(8)?;
                Value::Number
            }
            b'X' | 0x8c | 0x8d | b'U' | b'T' => {
                let n = self.uint(match code {
                    0x8c | b'U' => 1,
                    0x8d => 8,
                    _ => 4,
                })?;
                self.text(n)?
            }
            b'B' | b'C' | 0x8e | 0x96 => {
                let n = self.uint(match code {
                    b'C' => 1,
                    b'B' => 4,
                    _ => 8,
                })?;
                self.take(n)?;
                Value::Other
            }
            _ => return self.structure(code),
        };
        self.stack.push(value);
        Ok(())
    }

    /// Opcodes of containers, the memo and objects.
    fn structure(&mut self, code: u8) -> Outcome<()> {
        let value = match code {
            b'}' => self.dict(vec![]),
            b']' | b')' => self.items(vec![]),
            0x8f => Value::Other,
            b't' | b'l' => {
                let items = self.pop_mark()?;
                self.items(items)
            }
            0x91 => {
                self.pop_mark()?;
                Value::Other
            }
            0x85..=0x87 => {
                let mut items = (0..code - 0x84).map(|_| self.pop()).collect::<Outcome<Vec<_>>>()?;
                items.reverse();
                self.items(items)
            }
            b'd' => {
                let items = self.pop_mark()?;
                let entries = pairs(&items)?;
                self.dict(entries)
            }
            b'a' => {
                let item = self.pop()?;
                return self.append(vec![item]);
            }
            b'e' => {
                let items = self.pop_mark()?;
                return self.append(items);
            }
            0x90 => return self.pop_mark().map(drop),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                return self.insert(vec![(key, value)]);
            }
            b'u' => {
                let items = self.pop_mark()?;
                return self.insert(pairs(&items)?);
            }
            b'q' | b'r' | 0x94 => {
                let key = match code {
                    b'q' => self.uint(1)? as u32,
                    b'r' => self.uint(4)? as u32,
                    _ => self.memo.len() as u32,
                };
                self.memo.insert(key, self.top()?);
                return Ok(());
            }
            b'h' | b'j' => {
                let key = self.uint(if code == b'h' { 1 } else { 4 })? as u32;
                *self.memo.get(&key).ok_or_else(|| format!("the memo has no entry {key}"))?
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                Value::Global(global(self.str_of(module)?, self.str_of(name)?)?)
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                Value::Global(global(self.str_of(module)?, self.str_of(name)?)?)
            }
            b'R' | 0x81 => {
                let (args, f) = (self.pop()?, self.pop()?);
                self.call(f, args)?
            }
            b'b' => {
                // The state of an OrderedDict has only its attributes, such as `_metadata`, and no tensors.
                self.pop()?;
                return match self.top()? {
                    Value::Dict(_) => Ok(()),
                    _ => Err("a state for a value that is not a dict".into()),
                };
            }
            b'Q' => {
                let id = self.pop()?;
                self.storage(id)?
            }
            other => return Err(format!("opcode 0x{other:02x} is not one that torch.save writes")),
        };
        self.stack.push(value);
        Ok(())
    }

    /// An integer of `n` bytes in two's complement.
    fn long(&mut self, n: u64) -> Outcome<Value> {
        let bytes = self.take(n)?;
        if bytes.len() > 8 {
            return Ok(Value::Number);
        }
        let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
        let start = if negative { -1i64 } else { 0 };
        Ok(Value::Int(bytes.iter().rev().fold(start, |v, b| v << 8 | i64::from(*b))))
    }

    fn append(&mut self, items: Vec<Value>) -> Outcome<()> {
        match self.top()? {
            Value::Items(i) => {
                self.held += items.len();
                self.arena.items[i as usize].extend(items);
                Ok(())
            }
            _ => Err("items for a value that is not a list".into()),
        }
    }

    fn insert(&mut self, entries: Vec<(Value, Value)>) -> Outcome<()> {
        match self.top()? {
            Value::Dict(i) => {
                self.held += 2 * entries.len();
                self.arena.dicts[i as usize].extend(entries);
                Ok(())
            }
            _ => Err("entries for a value that is not a dict".into()),
        }
    }

    fn call(&mut self, f: Value, args: Value) -> Outcome<Value> {
        let Value::Global(f) = f else { return Err("a call of a value that is not a name".into()) };
        let args = self.items_of(args)?;
        match (f, args) {
            (Global::OrderedDict, []) => Ok(self.dict(vec![])),
            (Global::OrderedDict, [items]) => {
                let pairs = self.items_of(*items)?.iter().map(|p| match self.items_of(*p)? {
                    [key, value] => Ok((*key, *value)),
                    _ => Err("an entry of an OrderedDict is not a pair".to_string()),
                });
                let entries = pairs.collect::<Outcome<Vec<_>>>()?;
                // A pickle may refer to one list many times, so copies of it are counted.
                self.copied += entries.len();
                if self.copied > MAX_COPIED {
                    return Err(format!("more than {MAX_COPIED} entries of OrderedDicts in lists"));
                }
                Ok(self.dict(entries))
            }
            (Global::Size, [items]) => Ok(*items),
            (Global::RebuildParameter, [data @ Value::Tensor(_), ..]) => Ok(*data),
            (Global::RebuildTensor, [storage, offset, size, stride, ..]) => {
                let (storage, offset, size, stride) = (*storage, *offset, *size, *stride);
                self.tensor(storage, offset, [size, stride], None)
            }
            (
                Global::RebuildTyped,
                [storage, offset, size, stride, _, _, Value::Global(Global::Element(e)), ..],
            ) => {
                let (storage, offset, size, stride, e) = (*storage, *offset, *size, *stride, *e);
                self.tensor(storage, offset, [size, stride], Some(e))
            }
            (f, args) => Err(format!("{f:?} does not take these {} arguments", args.len())),
        }
    }

    fn sizes(&self, v: Value) -> Outcome<Vec<usize>> {
        let items = self.items_of(v)?;
        if items.len() > MAX_RANK {
            return Err(format!("a tensor of {} axes; the most is {MAX_RANK}", items.len()));
        }
        let one = |v: &Value| match v {
            Value::Int(n) => usize::try_from(*n).map_err(|_| format!("a size or stride of {n}")),
            _ => Err("a size or stride is not an integer".to_string()),
        };
        items.iter().map(one).collect()
    }

    fn tensor(
        &mut self,
        storage: Value,
        offset: Value,
        [size, stride]: [Value; 2],
        element: Option<Element>,
    ) -> Outcome<Value> {
        let Value::Storage(s) = storage else { return Err("a tensor without a storage".into()) };
        let offset = match offset {
            Value::Int(n) => u64::try_from(n).map_err(|_| format!("a tensor has the offset {n}"))?,
            _ => return Err("the offset of a tensor is not an integer".into()),
        };
        let (dims, strides) = (self.sizes(size)?, self.sizes(stride)?);
        if dims.len() != strides.len() {
            return Err(format!("{} sizes and {} strides", dims.len(), strides.len()));
        }
        let element = element.or(self.arena.storages[s as usize].element);
        let element = element.ok_or("a tensor without an element type")?;
        self.arena.tensors.push(View { storage: s, element, offset, dims, strides });
        Ok(Value::Tensor(self.arena.tensors.len() as u32 - 1))
    }

    /// The storage for a persistent id, which has the form `("storage", class, key, location, number of
    /// elements)`.
    fn storage(&mut self, id: Value) -> Outcome<Value> {
        let [kind, class, key, _, numel, ..] = self.items_of(id)? else {
            return Err("a reference to a storage of an unknown form".into());
        };
        let (Value::Global(Global::Storage(element)), Value::Int(numel)) = (class, numel) else {
            return Err("a reference to a storage of an unknown form".into());
        };
        if self.str_of(*kind)? != "storage" {
            return Err("a reference to a value that is not a storage".into());
        }
        let numel = u64::try_from(*numel).map_err(|_| format!("a storage of {numel} elements"))?;
        let key = self.str_of(*key)?;
        // Each storage has a copy of its key, and a pickle may refer to one key many times.
        if key.len() > MAX_KEY {
            return Err(format!("a storage's name of {} bytes; the most is {MAX_KEY}", key.len()));
        }
        let storage = Storage { key: key.to_string(), element: *element, numel };
        self.arena.storages.push(storage);
        Ok(Value::Storage(self.arena.storages.len() as u32 - 1))
    }
}

fn pairs(items: &[Value]) -> Outcome<Vec<(Value, Value)>> {
    let (pairs, rest) = items.as_chunks::<2>();
    match rest {
        [] => Ok(pairs.iter().map(|[k, v]| (*k, *v)).collect()),
        _ => Err("a key without a value".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_containers() {
        // (2, -1, 2**40, {'a': True})
        let p = b"\x80\x02(K\x02J\xff\xff\xff\xff\x8a\x06\0\0\0\0\0\x01}X\x01\0\0\0a\x88st.";
        let (arena, v) = read(p).unwrap();
        let Value::Items(i) = v else { panic!("{v:?}") };
        assert_eq!(arena.items[i as usize][..3], [Value::Int(2), Value::Int(-1), Value::Int(1 << 40)]);
        let Value::Dict(d) = arena.items[i as usize][3] else { panic!() };
        assert_eq!(arena.dicts[d as usize].len(), 1);
        assert_eq!(arena.dicts[d as usize][0].1, Value::Bool(true));
    }

    #[test]
    fn values_in_containers_count() {
        let part = [&b"("[..], &vec![b'N'; 1 << 20], b"e"].concat();
        let p = [&b"\x80\x02]"[..], &part.repeat(16), b"."].concat();
        assert!(read(&p).unwrap_err().contains("more than"));
    }

    #[test]
    fn code_is_not_run() {
        for p in
            [&b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."[..], b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93."]
        {
            let e = read(p).unwrap_err();
            assert!(e.contains("os.system") || e.contains("builtins.eval"), "{e}");
        }
    }

    #[test]
    fn attack_values_that_are_missing() {
        for p in [
            &b""[..],
            b".",
            b"0.",
            b"1.",
            b"t.",
            b"u.",
            b"(u.",
            b"a.",
            b"K\x01a.",
            b"R.",
            b")R.",
            b")).",
            b"h\0.",
            b"q\0.",
            b"(0.",
            b"K\x01(0.",
            b"b.",
            b"Q.",
            b")Q.",
            b"\x85.",
            b"X\xff\xff\xff\xffa.",
            b"cos",
            b"\x80\x09.",
            b"}(K\x01u.",
            b"\x8b\xff\xff\xff\xff.",
            b"i.",
        ] {
            match read(p) {
                Err(_) => {}
                Ok((_, v)) => assert_eq!(p, b")).", "{v:?}"),
            }
        }
    }
}
