//! Each rule on a small tree that breaks it, and a clean tree that breaks none.

use std::path::Path;

use tempfile::TempDir;

use super::{Finding, Tree, UNSAFE_ALLOWED, all};

/// A workspace of three crates (`ferroce-wire` below `ferroce-transport` below `ferroce-core`) with documents that
/// satisfy every rule.
struct Fixture {
    dir: TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let fixture = Fixture { dir: tempfile::tempdir().expect("a temporary folder") };
        fixture.write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n");
        fixture.krate("wire", "ferroce-wire", "");
        fixture.krate("transport", "ferroce-transport", "ferroce-wire = { path = \"../wire\" }");
        fixture.krate("core", "ferroce-core", "");
        fixture.documents("");
        fixture
    }

    /// README and ARCHITECTURE that name all that must be named, and `more`.
    fn documents(&self, more: &str) {
        let crates = "`crates/wire` `crates/transport` `crates/core`";
        let places: String = UNSAFE_ALLOWED.iter().map(|(place, _)| format!("`{place}` ")).collect();
        self.write("README.md", &format!("{crates} {more}"));
        self.write("ARCHITECTURE.md", &format!("{crates} {places} {more}"));
    }

    fn krate(&self, folder: &str, name: &str, dependencies: &str) {
        self.write(
            &format!("crates/{folder}/Cargo.toml"),
            &format!(
                "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[dependencies]\n{dependencies}\n"
            ),
        );
        self.write(&format!("crates/{folder}/src/lib.rs"), "");
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("folders can be made");
        std::fs::write(path, text).expect("files can be written");
    }

    fn findings(&self) -> Vec<Finding> {
        // The metadata has real paths; the temporary folder may lie behind a symbolic link.
        let root = self.dir.path().canonicalize().expect("the folder exists");
        all(&Tree::open(&root).expect("the fixture is a workspace")).expect("the fixture can be read")
    }

    /// The one finding there is.
    #[track_caller]
    fn only(&self) -> Finding {
        let findings = self.findings();
        assert_eq!(findings.len(), 1, "{findings:#?}");
        findings.into_iter().next().expect("there is one")
    }

    #[track_caller]
    fn clean(&self) {
        assert_eq!(self.findings(), []);
    }
}

#[track_caller]
fn assert_at(finding: &Finding, path: &str, line: usize, word: &str) {
    assert_eq!((finding.path.as_path(), finding.line), (Path::new(path), line), "{finding}");
    assert!(finding.what.contains(word), "{finding}");
}

#[test]
fn a_clean_tree_has_no_findings() {
    Fixture::new().clean();
}

#[test]
fn an_arrow_that_points_up() {
    let f = Fixture::new();
    f.krate("transport", "ferroce-transport", "");
    f.krate("wire", "ferroce-wire", "ferroce-transport = { path = \"../transport\" }");
    assert_at(&f.only(), "crates/wire/Cargo.toml", 0, "arrows point down only");
}

#[test]
fn a_test_only_arrow_that_points_up() {
    let f = Fixture::new();
    f.krate("transport", "ferroce-transport", "");
    f.krate("wire", "ferroce-wire", "[dev-dependencies]\nferroce-transport = { path = \"../transport\" }");
    assert_at(&f.only(), "crates/wire/Cargo.toml", 0, "arrows point down only");
}

#[test]
fn a_crate_without_a_layer() {
    let f = Fixture::new();
    f.krate("wire", "ferroce-wires", "");
    f.krate("transport", "ferroce-transport", "");
    assert_at(&f.only(), "crates/wire/Cargo.toml", 0, "has no layer");
}

#[test]
fn a_library_that_depends_on_a_tool() {
    let f = Fixture::new();
    f.krate("tool", "xtask", "");
    f.documents("`crates/tool`");
    f.clean();
    f.krate("wire", "ferroce-wire", "xtask = { path = \"../tool\" }");
    assert_at(&f.only(), "crates/wire/Cargo.toml", 0, "a tool and no library");
}

#[test]
fn unsafe_outside_its_places() {
    let f = Fixture::new();
    f.write(
        "crates/wire/src/lib.rs",
        "fn f() {\n    // SAFETY: a proof does not make the place right.\n    unsafe {}\n}\n",
    );
    assert_at(&f.only(), "crates/wire/src/lib.rs", 3, "outside the modules");
}

#[test]
fn unsafe_inside_a_macro_or_an_attribute_counts() {
    let f = Fixture::new();
    f.write("crates/wire/src/lib.rs", "#[unsafe(no_mangle)]\npub fn f() {}\n");
    assert_at(&f.only(), "crates/wire/src/lib.rs", 1, "outside the modules");
    f.write("crates/wire/src/lib.rs", "macro_rules! m { () => { unsafe fn f() {} } }\n");
    assert_at(&f.only(), "crates/wire/src/lib.rs", 1, "outside the modules");
}

#[test]
fn the_word_unsafe_in_comments_strings_and_lint_names_does_not_count() {
    let f = Fixture::new();
    f.write(
        "crates/wire/src/lib.rs",
        "//! No unsafe { here }.\n#![deny(unsafe_code)]\nconst S: &str = \"unsafe {}\";\n",
    );
    f.clean();
}

#[test]
fn places_of_unsafe_are_matched_by_whole_names() {
    let f = Fixture::new();
    let block = "fn f() {\n    // SAFETY: nothing is done.\n    unsafe {}\n}\n";
    f.write("crates/core/src/mem.rs", block);
    f.write("crates/core/src/mem/fixup.rs", block);
    f.krate("ibverbs", "ferroce-ibverbs", "");
    f.write("crates/ibverbs/src/entry/qp.rs", block);
    f.documents("`crates/ibverbs`");
    f.clean();
    f.write("crates/core/src/memory.rs", block);
    assert_at(&f.only(), "crates/core/src/memory.rs", 3, "outside the modules");
}

#[test]
fn integration_tests_may_be_unsafe_with_a_proof() {
    let f = Fixture::new();
    f.write("crates/wire/tests/t.rs", "fn f() {\n    // SAFETY: nothing is done.\n    unsafe {}\n}\n");
    f.clean();
    f.write("crates/wire/tests/t.rs", "fn f() {\n    unsafe {}\n}\n");
    assert_at(&f.only(), "crates/wire/tests/t.rs", 2, "SAFETY");
    f.write("crates/wire/tests/t.rs", "");
    f.write("crates/wire/src/tests/t.rs", "fn f() {\n    // SAFETY: nothing is done.\n    unsafe {}\n}\n");
    assert_at(&f.only(), "crates/wire/src/tests/t.rs", 3, "outside the modules");
}

#[test]
fn unsafe_without_a_proof() {
    let f = Fixture::new();
    f.write("crates/core/src/mem.rs", "fn f() {\n    // Safe, believe me.\n    unsafe {}\n}\n");
    assert_at(&f.only(), "crates/core/src/mem.rs", 3, "SAFETY");
    f.write("crates/core/src/mem.rs", "struct S;\n\nunsafe impl Send for S {}\n");
    assert_at(&f.only(), "crates/core/src/mem.rs", 3, "SAFETY");
}

#[test]
fn a_proof_of_an_earlier_statement_is_no_proof() {
    let f = Fixture::new();
    f.write("crates/core/src/mem.rs", "fn f() {\n    // SAFETY: nothing is done.\n    unsafe {};\n    unsafe {}\n}\n");
    assert_at(&f.only(), "crates/core/src/mem.rs", 4, "SAFETY");
}

#[test]
fn a_proof_of_another_arm_or_before_a_comment_is_no_proof() {
    let f = Fixture::new();
    let arms = "fn f() {\n    match x {\n        // SAFETY: nothing is done.\n        1 => unsafe { () },\n        _ => unsafe { () },\n    }\n}\n";
    f.write("crates/core/src/mem.rs", arms);
    assert_at(&f.only(), "crates/core/src/mem.rs", 5, "SAFETY");
    f.write(
        "crates/core/src/mem.rs",
        "fn f() {\n    // SAFETY: nothing is done.\n    g(); // Done.\n    unsafe {}\n}\n",
    );
    assert_at(&f.only(), "crates/core/src/mem.rs", 4, "SAFETY");
}

#[test]
fn a_proof_may_stand_above_the_statement_or_on_the_line() {
    let f = Fixture::new();
    f.write(
        "crates/core/src/mem.rs",
        "fn f() {\n    // SAFETY: nothing is done,\n    // twice.\n    #[rustfmt::skip]\n    let x =\n        unsafe { 1 };\n    \
         /* SAFETY: likewise. */ unsafe {}\n}\n// SAFETY: no state.\nunsafe impl Send for S {}\n",
    );
    f.clean();
}

#[test]
fn declarations_need_no_proof() {
    let f = Fixture::new();
    f.write("crates/core/src/mem.rs", "pub unsafe fn f() {}\nunsafe extern \"C\" {}\npub unsafe trait T {}\n");
    f.clean();
}

#[test]
fn a_file_of_a_thousand_lines_is_the_longest() {
    let f = Fixture::new();
    f.write("crates/wire/src/lib.rs", &"//\n".repeat(1000));
    f.clean();
    f.write("crates/wire/src/lib.rs", &"//\n".repeat(1001));
    assert_at(&f.only(), "crates/wire/src/lib.rs", 0, "1001 lines");
}

#[test]
fn a_file_that_is_not_rust() {
    let f = Fixture::new();
    f.write("crates/wire/src/lib.rs", "fn f() {\n");
    let finding = f.only();
    assert!(finding.what.contains("is not Rust"), "{finding}");
}

#[test]
fn a_skipped_test() {
    let f = Fixture::new();
    f.write("crates/wire/tests/t.rs", "#[test]\n#[ignore = \"later\"]\nfn t() {}\n");
    assert_at(&f.only(), "crates/wire/tests/t.rs", 2, "skipped test");
}

#[test]
fn a_clock_in_the_protocol() {
    let f = Fixture::new();
    f.write("crates/transport/src/lib.rs", "use std::time::Duration;\nuse std::time::Instant;\n");
    assert_at(&f.only(), "crates/transport/src/lib.rs", 2, "Instant");
    f.write("crates/transport/src/lib.rs", "");
    f.write("crates/transport/tests/t.rs", "use std::time::Instant;\n");
    f.clean();
}

#[test]
fn documents_that_do_not_name_a_crate() {
    let f = Fixture::new();
    f.write("README.md", "`crates/wire` `crates/core` and crates/transport without a code span");
    assert_at(&f.only(), "README.md", 0, "`crates/transport`");
}

#[test]
fn a_dependency_without_a_reason() {
    let f = Fixture::new();
    f.krate("wire", "ferroce-wire", "libc = \"0.2\"");
    assert_at(&f.only(), "ARCHITECTURE.md", 0, "dependency `libc`");
}

#[test]
fn a_place_of_unsafe_that_is_not_documented() {
    let f = Fixture::new();
    let (_, others) = UNSAFE_ALLOWED.split_first().expect("there are places");
    let places: String = others.iter().map(|(place, _)| format!("`{place}` ")).collect();
    f.write("ARCHITECTURE.md", &format!("`crates/wire` `crates/transport` `crates/core` {places}"));
    assert_at(&f.only(), "ARCHITECTURE.md", 0, UNSAFE_ALLOWED[0].0);
}

#[test]
fn a_missing_document() {
    let f = Fixture::new();
    std::fs::remove_file(f.dir.path().join("README.md")).expect("the file is there");
    assert_at(&f.only(), "README.md", 0, "cannot be read");
}
