//! Linking `libibverbs.so.1` and `librdmacm.so.1` from static libraries: the part that rustc cannot do.
//!
//! rustc writes a version script of its own for shared libraries, without versions, and rejects symbol names with one. So the crates are
//! built as static libraries and linked here by `cc`, with a version script and aliases generated from one list of symbols.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

/// Every symbol of the verbs library with its versions.
const SYMBOLS: &str = include_str!("../../crates/ibverbs/symbols.in");
/// File name and soname.
const LIBRARY: &str = "libibverbs.so.1";
/// The same of the library for connections.
const RDMACM_SYMBOLS: &str = include_str!("../../crates/rdmacm/symbols.in");
const RDMACM_LIBRARY: &str = "librdmacm.so.1";

/// Links `staticlib` (`libibverbs.a`) to `out_dir/libibverbs.so.1`. A library that is there already is replaced as a whole, so that
/// running programs keep the one they have.
///
/// # Errors
/// The list of symbols is malformed, or `cc` is missing or fails.
pub(crate) fn link_libibverbs(staticlib: &Path, out_dir: &Path) -> Result<()> {
    link(staticlib, SYMBOLS, LIBRARY, &[], out_dir)
}

/// Links `staticlib` (`librdmacm.a`) to `out_dir/librdmacm.so.1`, which needs the `libibverbs.so.1` that lies there, and finds it beside
/// itself when a program runs.
///
/// # Errors
/// As for [`link_libibverbs`].
pub(crate) fn link_librdmacm(staticlib: &Path, out_dir: &Path) -> Result<()> {
    link(staticlib, RDMACM_SYMBOLS, RDMACM_LIBRARY, &[LIBRARY], out_dir)
}

/// `needs` are libraries in `out_dir`.
fn link(staticlib: &Path, symbols: &str, library: &str, needs: &[&str], out_dir: &Path) -> Result<()> {
    let symbols = parse(symbols)?;
    let work = out_dir.join(format!("{library}.link"));
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let (map, aliases, fresh) = (work.join("map"), work.join("aliases.s"), work.join(library));
    fs::write(&map, version_script(&symbols)).with_context(|| format!("cannot write {}", map.display()))?;
    fs::write(&aliases, assembly(&symbols)?).with_context(|| format!("cannot write {}", aliases.display()))?;
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-o"])
        .arg(&fresh)
        .arg(&aliases)
        .arg("-Wl,--whole-archive")
        .arg(staticlib)
        .arg("-Wl,--no-whole-archive")
        .args(needs.iter().map(|needed| out_dir.join(needed)))
        .arg(format!("-Wl,--version-script={}", map.display()))
        .arg(format!("-Wl,-soname,{library}"))
        // Threads of the engine run this code: it must never go away. What the library calls is what it defines.
        .args(["-Wl,-z,nodelete", "-Wl,-z,relro,-z,now", "-Wl,-Bsymbolic-functions", "-Wl,--no-undefined"])
        .args(["-Wl,--gc-sections", "-Wl,-O1", "-Wl,--build-id"])
        .args(["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc"]);
    if !needs.is_empty() {
        cc.arg("-Wl,-rpath,$ORIGIN");
    }
    let output = cc.output().context("cannot run `cc`: a C compiler is needed to link the verbs library")?;
    ensure!(
        output.status.success(),
        "cc could not link {library} ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    fs::rename(&fresh, out_dir.join(library)).with_context(|| format!("cannot move {library} to its place"))?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
}

/// What a line of the list says.
#[derive(Debug, PartialEq, Eq)]
struct Symbol<'a> {
    /// Version nodes; the first is the default version unless `is_old`.
    nodes: Vec<String>,
    is_data: bool,
    /// No default version: only programs linked long ago find it.
    is_old: bool,
    name: &'a str,
    /// The function that the static library defines; `name` except for old symbols.
    target: &'a str,
}

impl Symbol<'_> {
    /// The nodes that need an alias: all but the default one.
    fn alias_nodes(&self) -> &[String] {
        if self.is_old { &self.nodes } else { &self.nodes[1..] }
    }
}

/// Reads the list: node(s), kind, name, and for old symbols the function.
fn parse(list: &str) -> Result<Vec<Symbol<'_>>> {
    let mut symbols = Vec::new();
    for (at, line) in list.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (nodes, kind, name, target) = match columns[..] {
            [nodes, kind @ ("fn" | "data"), name] => (nodes, kind, name, name),
            [nodes, kind @ "old", name, target] => (nodes, kind, name, target),
            _ => bail!("symbols.in:{}: not `nodes fn|data name` or `node old name function`: {line}", at + 1),
        };
        symbols.push(Symbol {
            nodes: expand(nodes).with_context(|| format!("symbols.in:{}", at + 1))?,
            is_data: kind == "data",
            is_old: kind == "old",
            name,
            target,
        });
    }
    Ok(symbols)
}

/// `IBVERBS_PRIVATE_34,57` stands for `IBVERBS_PRIVATE_34` and `IBVERBS_PRIVATE_57`.
fn expand(nodes: &str) -> Result<Vec<String>> {
    let mut numbers = nodes.split(',');
    let first = numbers.next().unwrap_or_default();
    let (series, _) = first.rsplit_once('_').context("a node without a number")?;
    Ok(std::iter::once(first.to_owned()).chain(numbers.map(|number| format!("{series}_{number}"))).collect())
}

/// Nodes in the order of their first mention.
fn nodes<'a>(symbols: &'a [Symbol<'_>]) -> Vec<&'a str> {
    let mut nodes: Vec<&str> = Vec::new();
    for node in symbols.iter().flat_map(|symbol| &symbol.nodes) {
        if !nodes.contains(&node.as_str()) {
            nodes.push(node);
        }
    }
    nodes
}

/// The version script of the GNU linker. Public nodes inherit from the one before; everything not listed stays inside.
fn version_script(symbols: &[Symbol<'_>]) -> String {
    let mut script = String::new();
    let mut parent = None;
    for (at, node) in nodes(symbols).into_iter().enumerate() {
        writeln!(script, "{node} {{\n    global:").expect("a string grows");
        for symbol in symbols.iter().filter(|symbol| !symbol.is_old && symbol.nodes[0] == node) {
            writeln!(script, "        {};", symbol.name).expect("a string grows");
        }
        if at == 0 {
            script.push_str("    local: *;\n");
        }
        let is_public = !node.contains("PRIVATE");
        match parent.filter(|_| is_public) {
            Some(parent) => writeln!(script, "}} {parent};"),
            None => writeln!(script, "}};"),
        }
        .expect("a string grows");
        if is_public {
            parent = Some(node);
        }
    }
    script
}

/// Further versions of a name: a jump to the function, or an object of its own, with one `.symver` for each version.
fn assembly(symbols: &[Symbol<'_>]) -> Result<String> {
    let jump = match std::env::consts::ARCH {
        "x86_64" => "jmp",
        "aarch64" => "b",
        other => bail!("symbol aliases are not known for {other}: only x86_64 and aarch64 are supported"),
    };
    let mut text = String::from("    .section .note.GNU-stack,\"\",%progbits\n");
    for symbol in symbols.iter().filter(|symbol| !symbol.alias_nodes().is_empty()) {
        let (name, target) = (symbol.name, symbol.target);
        let alias = format!("ferroce_alias_{name}");
        let body = if symbol.is_data {
            format!(
                "    .bss\n    .type {alias}, %object\n    .size {alias}, 8\n    .balign 8\n{alias}:\n    .skip 8\n"
            )
        } else {
            // Where the linker puts a stub between, as it does for far functions, it is one.
            let target = if jump == "jmp" { format!("{target}@PLT") } else { target.to_owned() };
            format!("    .text\n    .type {alias}, %function\n    .balign 16\n{alias}:\n    {jump} {target}\n")
        };
        write!(text, "    .globl {alias}\n{body}").expect("a string grows");
        for node in symbol.alias_nodes() {
            writeln!(text, "    .symver {alias}, {name}@{node}").expect("a string grows");
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
# comment
A_1.0        fn   one
A_1.1        fn   two
A_1.1        old  three inside

A_PRIVATE_7,8 data four
A_PRIVATE_8  fn   five
";

    #[test]
    fn the_script_has_every_default_version_and_inherits() {
        let script = version_script(&parse(LIST).expect("well-formed"));
        assert_eq!(
            script,
            "A_1.0 {\n    global:\n        one;\n    local: *;\n};\nA_1.1 {\n    global:\n        two;\n} A_1.0;\n\
             A_PRIVATE_7 {\n    global:\n        four;\n};\nA_PRIVATE_8 {\n    global:\n        five;\n};\n"
        );
    }

    #[test]
    fn further_versions_are_aliases() {
        let text = assembly(&parse(LIST).expect("well-formed")).expect("a known machine");
        assert!(text.contains("    .symver ferroce_alias_three, three@A_1.1\n"), "{text}");
        assert!(text.contains("    .symver ferroce_alias_four, four@A_PRIVATE_8\n"), "{text}");
        assert!(text.contains(" inside"), "{text}");
        assert!(!text.contains("ferroce_alias_one"), "{text}");
    }

    #[test]
    fn malformed_lines_are_named() {
        let error = parse("A_1.0 fn one\nA_1.0 what two\n").expect_err("no such kind");
        assert!(error.to_string().starts_with("symbols.in:2"), "{error}");
        assert!(parse("A fn one\n").is_err());
    }

    #[test]
    fn the_lists_of_the_libraries_are_well_formed_and_name_nothing_twice() {
        for (list, first) in [(SYMBOLS, "IBVERBS_1.0"), (RDMACM_SYMBOLS, "RDMACM_1.0")] {
            let symbols = parse(list).expect("well-formed");
            let mut names: Vec<&str> = symbols.iter().map(|symbol| symbol.name).collect();
            names.sort_unstable();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count);
            assert_eq!(nodes(&symbols)[0], first);
        }
    }
}
