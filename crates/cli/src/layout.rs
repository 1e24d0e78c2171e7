//! Where the parts of an installation are: `bin/ferroce`, `bin/ferroced`, `lib/libibverbs.so.1`, `lib/libferroce-sysfs.so`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The verbs library, by its soname.
pub(crate) const LIBRARY: &str = "libibverbs.so.1";
/// The library that shows programs the devices in the file system.
const PRELOAD: &str = "libferroce-sysfs.so";

/// Paths that a program needs to use Ferroce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Folder of the libraries.
    pub(crate) lib: PathBuf,
    /// The service; `None` if it does not lie beside this program (the library then searches PATH).
    pub(crate) service: Option<PathBuf>,
}

impl Layout {
    /// Finds the libraries in `lib` (from `FERROCE_LIB`) or in `../lib` of this program.
    pub(crate) fn find(lib: Option<PathBuf>) -> Result<Layout> {
        let program = std::env::current_exe().context("cannot find out where this program lies (is /proc mounted?)")?;
        Layout::of(&program, lib)
    }

    fn of(program: &Path, lib: Option<PathBuf>) -> Result<Layout> {
        let bin = program.parent().expect("a program lies in a folder");
        let (lib, remedy) = match lib {
            Some(lib) => (lib, "correct FERROCE_LIB, or unset it"),
            None => (
                bin.parent().unwrap_or(bin).join("lib"),
                "run target/ferroce/bin/ferroce as `cargo xtask build` leaves it, or set FERROCE_LIB to the library's folder",
            ),
        };
        let library = lib.join(LIBRARY);
        if !library.is_file() {
            bail!("{} does not exist: {remedy}", library.display());
        }
        let lib = lib.canonicalize().with_context(|| format!("cannot resolve {}", lib.display()))?;
        // The loader splits LD_PRELOAD at blanks and colons and knows no way to quote them.
        if lib.to_string_lossy().contains([' ', ':', '\t', '\n']) {
            bail!("{:?} has a blank or a colon, which LD_PRELOAD cannot carry: install Ferroce elsewhere", lib);
        }
        let service = Some(bin.join("ferroced")).filter(|service| service.is_file());
        Ok(Layout { lib, service })
    }

    /// The verbs library.
    pub(crate) fn library(&self) -> PathBuf {
        self.lib.join(LIBRARY)
    }

    /// The library for `ferroce run --sysfs`.
    pub(crate) fn preload(&self) -> Result<PathBuf> {
        let library = self.lib.join(PRELOAD);
        if !library.is_file() {
            bail!(
                "{} does not exist: --sysfs needs a whole installation, as `cargo xtask build` leaves it",
                library.display()
            );
        }
        Ok(library)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn installation(files: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for file in files {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().expect("has a folder")).expect("can make folders");
            fs::write(path, "").expect("can write");
        }
        dir
    }

    #[test]
    fn an_installation_is_found_from_its_program() {
        let dir = installation(&["bin/ferroce", "bin/ferroced", "lib/libibverbs.so.1"]);
        let layout = Layout::of(&dir.path().join("bin/ferroce"), None).expect("is complete");
        assert_eq!(layout.library(), dir.path().canonicalize().expect("exists").join("lib/libibverbs.so.1"));
        assert_eq!(layout.service, Some(dir.path().join("bin/ferroced")));
    }

    #[test]
    fn a_library_elsewhere_is_taken_from_the_environment() {
        let dir = installation(&["bin/ferroce", "other/libibverbs.so.1"]);
        let layout = Layout::of(&dir.path().join("bin/ferroce"), Some(dir.path().join("other"))).expect("is there");
        assert!(layout.lib.ends_with("other"));
        assert_eq!(layout.service, None);
    }

    #[test]
    fn a_missing_library_is_named_with_the_remedy() {
        let dir = installation(&["bin/ferroce"]);
        let error = Layout::of(&dir.path().join("bin/ferroce"), None).expect_err("has no library").to_string();
        assert!(error.contains("lib/libibverbs.so.1 does not exist") && error.contains("cargo xtask build"), "{error}");
        let error = Layout::of(&dir.path().join("bin/ferroce"), Some("/nowhere".into())).expect_err("no such folder");
        assert!(error.to_string().contains("correct FERROCE_LIB"), "{error}");
    }

    #[test]
    fn a_folder_that_the_loader_would_split_is_refused() {
        let dir = installation(&["bin/ferroce", "a b/libibverbs.so.1"]);
        let error = Layout::of(&dir.path().join("bin/ferroce"), Some(dir.path().join("a b"))).expect_err("has a blank");
        assert!(error.to_string().contains("install Ferroce elsewhere"), "{error}");
    }
}
