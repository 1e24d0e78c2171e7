//! The guest's root: programs of this machine with their libraries, modules, and this executable as `/init`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cpio::Archive;
use crate::kernel::Kernel;
use crate::modules::Dependencies;
use crate::needs;

/// Where the guest finds the list of modules, in loading order.
pub const MODULE_LIST: &str = "/modules/list";
/// Where the guest's programs are looked for.
pub const PATH: &str = "/bin";

/// Modules that the guest needs, if they are not built in.
const MODULES: &[&str] =
    &["virtio_pci", "virtio_console", "virtio_net", "crc32_generic", "rdma_rxe", "ib_umad", "rdma_ucm", "af_packet"];

/// Programs of this machine that the guest gets.
const PROGRAMS: &[&str] = &[
    "busybox",
    "ip",
    "rdma",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_uc_pingpong",
    "ibv_ud_pingpong",
    "ibv_srq_pingpong",
    "ib_send_bw",
    "ib_send_lat",
    "ib_write_bw",
    "ib_write_lat",
    "ib_read_bw",
    "ib_read_lat",
    "ib_atomic_bw",
    "ib_atomic_lat",
    "rping",
    "ucmatose",
    "udaddy",
    "rdma_client",
    "rdma_server",
    "rstream",
    "mckey",
];

/// The provider of rxe, which libibverbs opens by itself.
const PROVIDER: &str = "librxe-rdmav34.so";

/// Writes the guest's root to `to`, with the programs `own` of this bench in its /bin.
pub fn write(kernel: &Kernel, own: &[PathBuf], to: &Path) -> Result<()> {
    let mut tree = Tree { archive: Archive::new(BufWriter::new(File::create(to)?)), folders: BTreeSet::new() };
    for folder in ["/dev", "/proc", "/sys", "/tmp", "/bin", "/modules"] {
        tree.folder(folder)?;
    }
    tree.archive.device("/dev/console", 5, 1)?;
    let init = std::env::current_exe().context("cannot find this executable")?;
    tree.program(&init, "/init")?;
    for name in PROGRAMS {
        let path = needs::find(name).with_context(|| format!("{name} is missing"))?;
        tree.program(&path, &format!("/bin/{name}"))?;
    }
    for path in own {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        tree.program(path, &format!("/bin/{name}"))?;
    }
    tree.provider()?;
    tree.modules(kernel)?;
    tree.archive.finish()?;
    Ok(())
}

struct Tree {
    archive: Archive<BufWriter<File>>,
    /// Folders and files that are there already.
    folders: BTreeSet<String>,
}

impl Tree {
    fn folder(&mut self, path: &str) -> Result<()> {
        if path.is_empty() || path == "/" || !self.folders.insert(path.to_owned()) {
            return Ok(());
        }
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent)?;
        }
        Ok(self.archive.folder(path)?)
    }

    fn file(&mut self, path: &str, content: &[u8]) -> Result<()> {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent)?;
        }
        if self.folders.insert(path.to_owned()) {
            self.archive.file(path, content)?;
        }
        Ok(())
    }

    fn copy(&mut self, from: &Path, to: &str) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.file(to, &content)
    }

    /// A program with the libraries that it is linked with.
    fn program(&mut self, from: &Path, to: &str) -> Result<()> {
        self.copy(from, to)?;
        for library in libraries(from)? {
            self.copy(Path::new(&library), &library)?;
        }
        Ok(())
    }

    /// rxe's provider, at the place where this machine's libibverbs looks for it.
    fn provider(&mut self) -> Result<()> {
        let folder = ["/usr/lib/x86_64-linux-gnu/libibverbs", "/usr/lib64/libibverbs", "/usr/lib/libibverbs"]
            .iter()
            .find(|folder| Path::new(folder).join(PROVIDER).is_file())
            .with_context(|| format!("{PROVIDER} is missing: apt-get install ibverbs-providers"))?;
        let path = format!("{folder}/{PROVIDER}");
        self.program(Path::new(&path), &path)?;
        self.copy(Path::new("/etc/libibverbs.d/rxe.driver"), "/etc/libibverbs.d/rxe.driver")
    }

    fn modules(&mut self, kernel: &Kernel) -> Result<()> {
        let dep = fs::read_to_string(kernel.modules.join("modules.dep")).context("cannot read modules.dep")?;
        let dependencies = Dependencies::parse(&dep);
        if dependencies.find("rdma_rxe").is_none() {
            bail!("the kernel {} has no rdma_rxe", kernel.release);
        }
        let mut list = String::new();
        for path in dependencies.load_order(MODULES) {
            let content = module(&kernel.modules.join(&path))?;
            let file = path.rsplit('/').next().unwrap_or(&path);
            let target = format!("/modules/{}", file.trim_end_matches(".xz"));
            self.file(&target, &content)?;
            list += &format!("{target}\n");
        }
        self.file(MODULE_LIST, list.as_bytes())
    }
}

/// A module's bytes, as the kernel wants them.
fn module(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    }
    let output = Command::new("xz").args(["--decompress", "--stdout"]).arg(path).stdin(Stdio::null()).output()?;
    if !output.status.success() {
        bail!("cannot unpack {}: {}", path.display(), needs::last_line(&output.stderr));
    }
    Ok(output.stdout)
}

/// The libraries that a program is linked with, as absolute paths; none for a static one.
fn libraries(program: &Path) -> Result<Vec<String>> {
    let output = Command::new("ldd").arg(program).stdin(Stdio::null()).output().context("cannot run ldd")?;
    parse_ldd(&String::from_utf8_lossy(&output.stdout)).with_context(|| program.display().to_string())
}

fn parse_ldd(text: &str) -> Result<Vec<String>> {
    let mut paths = Vec::new();
    for line in text.lines() {
        if line.contains("not found") {
            bail!("a library is missing: {}", line.trim());
        }
        paths.extend(line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned));
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_a_program() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f2)\n";
        let found = parse_ldd(text).expect("all there");
        assert_eq!(found, ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"]);
        assert!(parse_ldd("\tstatically linked\n").expect("none").is_empty());
        let error = parse_ldd("\tlibmlx5.so.1 => not found\n").expect_err("one is missing");
        assert!(error.to_string().contains("libmlx5"), "{error}");
    }
}
