//! A folder for what all tests of a process share.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A new folder that is removed when it is dropped, or when this process ends, however it ends: what a `static` holds is never dropped.
pub struct SharedFolder {
    path: PathBuf,
    /// Waits for the end of its input, which is this process's to close.
    remover: Child,
}

impl SharedFolder {
    /// A folder below that of temporary files.
    ///
    /// # Panics
    /// It cannot be made, or there is no shell.
    #[expect(clippy::new_without_default, reason = "it makes something")]
    pub fn new() -> SharedFolder {
        let path = std::env::temp_dir().join(crate::free_name());
        DirBuilder::new().mode(0o700).create(&path).expect("a temporary folder can be made");
        let remover = Command::new("sh")
            .args(["-c", "read _; rm -rf -- \"$0\""])
            .arg(&path)
            // An interrupt from the terminal is not for it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("there is a shell");
        SharedFolder { path, remover }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SharedFolder {
    fn drop(&mut self) {
        drop(self.remover.stdin.take());
        // What it could not remove stays.
        let _ = self.remover.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_with_all_that_is_in_it() {
        let folder = SharedFolder::new();
        let path = folder.path().to_owned();
        std::fs::create_dir(path.join("sub")).expect("can be made");
        std::fs::write(path.join("sub/file"), "x").expect("can be written");
        drop(folder);
        assert!(!path.exists());
    }
}
