//! Cargo profiles for packages outside of Halcyon's workspace.

use std::path::PathBuf;

/// Writes the profiles of Halcyon's workspace to a configuration file of cargo, and returns its path. With
/// the same profiles, packages outside of the workspace use what the workspace's tests have built.
pub(crate) fn workspace() -> Result<PathBuf, String> {
    let root = crate::root();
    let manifest = root.join("Cargo.toml");
    let text = std::fs::read_to_string(&manifest).map_err(|e| format!("{}: {e}", manifest.display()))?;
    let mut profiles = profiles_of(&text);
    let crates = root.join("crates");
    let release = level(&profiles, "[profile.release]").unwrap_or("3").to_string();
    let entries = std::fs::read_dir(&crates).map_err(|e| format!("{}: {e}", crates.display()))?;
    for entry in entries.flatten() {
        // In another workspace, the settings for "*" also apply to Halcyon's crates. So each crate gets the
        // settings that it has in Halcyon's workspace.
        let name = entry.file_name().display().to_string();
        let dev = "debug = \"line-tables-only\"\n";
        let bench = "debug-assertions = true\noverflow-checks = true\n";
        for (profile, own, level) in
            [("dev", dev, "0"), ("release", "", release.as_str()), ("bench", bench, "0")]
        {
            let table = format!("[profile.{profile}.package.{name}]\n");
            match profiles.find(&table) {
                Some(at) => profiles.insert_str(at + table.len(), own),
                None => profiles.push_str(&format!("{table}{own}opt-level = {level}\n")),
            }
        }
    }
    let to = crate::target_dir().join("profiles.toml");
    std::fs::create_dir_all(crate::target_dir())
        .and_then(|()| std::fs::write(&to, profiles))
        .map_err(|e| format!("{}: {e}", to.display()))?;
    Ok(to)
}

/// The tables of profiles in the text of a manifest.
fn profiles_of(manifest: &str) -> String {
    let mut inside = false;
    let mut out = String::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.starts_with("[profile.");
        }
        if inside {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// The level of optimisation of a profile, as its table gives it.
fn level<'a>(profiles: &'a str, table: &str) -> Option<&'a str> {
    let mut lines = profiles.lines().skip_while(|l| *l != table).skip(1).take_while(|l| !l.starts_with('['));
    lines.find_map(|l| l.strip_prefix("opt-level = "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profiles_of_a_manifest_are_all_its_tables_of_profiles() {
        let manifest = "[package]\nname = 'a'\n[profile.dev]\nlto = 'off'\n\n[lints]\nx = 1\n[profile.dev.package.b]\nopt-level = 0\n";
        let want = "[profile.dev]\nlto = 'off'\n\n[profile.dev.package.b]\nopt-level = 0\n";
        assert_eq!(profiles_of(manifest), want);
    }

    #[test]
    fn the_level_of_a_profile_is_that_of_its_table() {
        let text = "[profile.a]\nlto = 'off'\n[profile.b]\nopt-level = 2\n[profile.c]\nopt-level = 3\n";
        assert_eq!((level(text, "[profile.b]"), level(text, "[profile.a]")), (Some("2"), None));
    }
}
