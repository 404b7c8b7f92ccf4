//! The drivers of this process: those of the table in [`crate::backend`] that this build has, and those
//! registered at run time.

use crate::backend::{self, BUILT_IN, BuiltIn};
use crate::{BackendType, Driver, Error, Result};
use std::sync::{Arc, LazyLock, RwLock};

static DRIVERS: LazyLock<RwLock<Vec<Arc<dyn Driver>>>> = LazyLock::new(|| RwLock::new(built_in()));

fn built_in() -> Vec<Arc<dyn Driver>> {
    BUILT_IN.iter().filter_map(|b| (b.driver)()).collect()
}

/// All drivers of this process, in registration order.
pub fn drivers() -> Vec<Arc<dyn Driver>> {
    DRIVERS.read().unwrap_or_else(|e| e.into_inner()).clone()
}

/// Adds a driver, or replaces the one of the same backend. From then on, the names of its backend can be
/// parsed and selected.
///
/// # Errors
/// [`Error::Argument`] if the names of a backend that is not built in are malformed or belong to another
/// backend; also for [`BackendType::Auto`].
pub fn register(d: Arc<dyn Driver>) -> Result<()> {
    let kind = d.kind();
    let mut v = DRIVERS.write().unwrap_or_else(|e| e.into_inner());
    let others = v.iter().map(|x| x.kind()).filter(|k| matches!(k, BackendType::Other(_)) && *k != kind);
    let known = backend::kinds().chain(others);
    check(kind, known)?;
    v.retain(|x| x.kind() != kind);
    v.push(d);
    Ok(())
}

/// Checks that a backend's names are well-formed and not used by the `known` backends.
fn check(kind: BackendType, known: impl Iterator<Item = BackendType>) -> Result<()> {
    let bad = |what: String| Err(Error::argument("register", what));
    match kind {
        BackendType::Auto => return bad("\"auto\" cannot have a driver: it stands for any backend".into()),
        BackendType::Other(_) => {}
        _ => return Ok(()),
    }
    let known: Vec<BackendType> = known.collect();
    for name in kind.row().names() {
        let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        if name.is_empty() || !name.chars().all(letter) {
            return bad(format!(
                "\"{name}\" cannot be a backend's name: use lower-case letters, digits, - and _"
            ));
        }
        if let Some(k) = known.iter().find(|k| k.row().names().any(|n| n == name)) {
            return bad(format!("the name \"{name}\" belongs to the backend {k}: choose another"));
        }
    }
    Ok(())
}

/// The driver of a backend; [`Error::Unavailable`] if this build has none.
pub fn driver(kind: BackendType) -> Result<Arc<dyn Driver>> {
    drivers().into_iter().find(|d| d.kind() == kind).ok_or_else(|| {
        let (reason, fix) = match kind.built_in() {
            Some(BuiltIn { feature: Some(f), fix, .. }) => {
                (format!("this build has the feature \"{f}\" switched off"), *fix)
            }
            Some(b) => ("it has no driver".into(), b.fix),
            None => (
                "no driver of this name is registered".into(),
                "Register it with halcyon_hal::registry::register",
            ),
        };
        Error::Unavailable { backend: kind.id().into(), tried: vec![], reason, fix: fix.into() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Row;

    #[test]
    fn registered_names_parse_and_are_unique() {
        static MINE: Row =
            Row { id: "mine", title: "Mine", vendor: "", priority: None, aliases: &["my-own"] };
        static TAKEN: Row = Row { id: "theirs", aliases: &["nvidia"], ..MINE };
        static SPOILT: Row = Row { id: "a,b", aliases: &[], ..MINE };
        static AGAIN: Row = Row { id: "again", aliases: &["my-own"], ..MINE };
        let with = |row, mine: &[BackendType]| {
            let known = backend::kinds().chain(mine.iter().copied());
            check(BackendType::Other(row), known).map_err(|e| e.to_string())
        };
        with(&MINE, &[]).unwrap();
        assert!(with(&TAKEN, &[]).unwrap_err().contains("belongs to the backend cuda"));
        assert!(with(&SPOILT, &[]).unwrap_err().contains("\"a,b\""));
        let mine = [BackendType::Other(&MINE)];
        assert!(with(&AGAIN, &mine).unwrap_err().contains("belongs to the backend mine"));
        assert!(check(BackendType::Auto, [].into_iter()).is_err());
        let e = driver(mine[0]).unwrap_err();
        assert!(e.exit_code() == 4 && e.to_string().contains("registry::register"), "{e}");
    }
}
