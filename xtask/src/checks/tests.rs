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

/// A row of the table of verbs that says `ferroce` and names `test`.
fn row(verb: &str, ferroce: &str, test: &str) -> String {
    let others = "rxe = \"yes\", siw = \"no\", mlx5 = \"part\"";
    format!("{{ verb = \"{verb}\", ferroce = \"{ferroce}\", {others}, test = \"{test}\" }},\n")
}

/// A tree with a libibverbs: a symbol, a slot, a refused verb, and a table of them with its page.
fn with_verbs() -> Fixture {
    let f = Fixture::new();
    f.krate("ibverbs", "ferroce-ibverbs", "");
    f.documents("`crates/ibverbs`");
    f.write(
        "crates/ibverbs/symbols.in",
        "# public\nIBVERBS_1.0 fn ibv_plain\nIBVERBS_1.1 fn _ibv_not\nIBVERBS_PRIVATE_34 fn x\n",
    );
    let source = "slot! { fn slot as \"ibv_slot\" () { Ok(()) } }\n\
                  verb! { fn ibv_plain() { Ok(()) } fn _ibv_not() { refused(WHY) } }\n";
    f.write("crates/ibverbs/src/lib.rs", source);
    f.write("crates/ibverbs/tests/all.c", "ibv_plain(); ibv_slot(); _ibv_not();\n");
    f.write("tests/suite/passed-44.txt", "tests.test_x.X.test_y\n");
    f.table(&[
        row("ibv_plain", "yes", "rdma-core 44: tests.test_x.X.test_y"),
        row("ibv_slot", "yes", "crates/ibverbs/tests/all.c"),
        row("ibv_not", "no", "crates/ibverbs/tests/all.c"),
    ]);
    f
}

impl Fixture {
    /// A table of verbs, and the page that the check makes of it.
    fn table(&self, rows: &[String]) {
        let text = format!("[[section]]\ntitle = \"All\"\nverbs = [\n{}]\n", rows.concat());
        self.write("docs/verbs.toml", &text);
        self.findings();
    }

    /// The one finding after the row of a verb is another.
    #[track_caller]
    fn only_with(&self, verb: &str, row: &str) -> Finding {
        let path = self.dir.path().join("docs/verbs.toml");
        let table = std::fs::read_to_string(&path).expect("the table is there");
        let is_old = |line: &&str| !line.contains(&format!("\"{verb}\""));
        let kept: Vec<&str> = table.lines().filter(is_old).collect();
        let changed = kept.join("\n").replace("verbs = [", &format!("verbs = [\n{row}"));
        std::fs::write(path, changed).expect("the table is ours");
        self.findings();
        self.only()
    }
}

#[test]
fn a_table_of_verbs_that_is_true() {
    let f = with_verbs();
    f.clean();
    let page = std::fs::read_to_string(f.dir.path().join("docs/verbs.md")).expect("the page was made");
    assert!(page.contains("| `ibv_plain` | yes | yes | no | part | 44: test_x.X.test_y |"), "{page}");
    assert!(page.contains("| Ferroce | 2 | 0 | 1 |"), "{page}");
}

#[test]
fn a_page_of_verbs_that_is_stale_is_written_anew() {
    let f = with_verbs();
    f.write("docs/verbs.md", "old");
    assert_at(&f.only(), "docs/verbs.md", 0, "written anew");
    f.clean();
}

#[test]
fn a_verb_without_a_row() {
    assert_at(&with_verbs().only_with("ibv_plain", ""), "crates/ibverbs/symbols.in", 2, "ibv_plain is public");
    assert_at(&with_verbs().only_with("ibv_not", ""), "crates/ibverbs/symbols.in", 3, "ibv_not is public");
    assert_at(&with_verbs().only_with("ibv_slot", ""), "crates/ibverbs/src", 0, "ibv_slot has no row");
}

#[test]
fn a_row_whose_test_does_not_exist() {
    let wrong = |test: &str| with_verbs().only_with("ibv_slot", &row("ibv_slot", "yes", test));
    assert_at(&wrong("rdma-core 44: tests.test_x.X.test_z"), "docs/verbs.toml", 4, "not among what passes");
    assert_at(&wrong("rdma-core 56: tests.test_x.X.test_y"), "docs/verbs.toml", 4, "not among what passes");
    assert_at(&wrong("rdma-core new: tests.test_x.X.test_y"), "docs/verbs.toml", 4, "names no test");
    assert_at(&wrong("crates/ibverbs/tests/none.c"), "docs/verbs.toml", 4, "cannot be read");
    assert_at(&wrong("crates/ibverbs/src/lib.rs::none"), "docs/verbs.toml", 4, "is not in crates/ibverbs/src/lib.rs");
    assert_at(&wrong("tests/suite/passed-44.txt"), "docs/verbs.toml", 4, "is not called");
}

#[test]
fn a_row_that_says_otherwise_than_the_source() {
    let test = "crates/ibverbs/tests/all.c";
    let wrong = |verb, ferroce| with_verbs().only_with(verb, &row(verb, ferroce, test));
    assert_at(&wrong("ibv_not", "yes"), "docs/verbs.toml", 4, "is refused");
    assert_at(&wrong("ibv_slot", "no"), "docs/verbs.toml", 4, "is not refused");
    assert_at(&wrong("ibv_slot", "part"), "docs/verbs.toml", 4, "its note must say");
}

#[test]
fn a_variable_that_the_table_lacks_is_found_and_one_that_nothing_reads() {
    let fixture = Fixture::new();
    fixture.write("crates/core/src/lib.rs", "fn f() {\n    g(&[\"FERROCE_X\"], \"FERROCE_Y=1\", \"FERROCE_Z1\");\n}\n");
    fixture.write("crates/core/tests/t.rs", "const T: &str = \"FERROCE_TEST\";\n");
    let finding = fixture.only();
    assert_eq!((finding.path.as_path(), finding.line), (Path::new("crates/core/src/lib.rs"), 2));
    assert!(finding.what.contains("`FERROCE_X`"), "{finding}");
    fixture.documents("\n| `FERROCE_X=1`, `FERROCE_W` (0, 1) | does `FERROCE_V` |\n");
    let finding = fixture.only();
    assert_eq!((finding.path.as_path(), finding.line), (Path::new("README.md"), 2));
    assert!(finding.what.contains("`FERROCE_W`"), "{finding}");
}

#[test]
fn events_are_all_there_and_have_a_test_or_a_reason() {
    let with = |events: &[String]| {
        let f = with_verbs();
        let path = f.dir.path().join("docs/verbs.toml");
        let verbs = std::fs::read_to_string(&path).expect("the table is there");
        std::fs::write(path, verbs + &events.concat()).expect("the table is ours");
        f.findings();
        f
    };
    let event = |name: &str, cause: &str, test: &str| {
        format!("[[event]]\nevent = \"{name}\"\ncause = \"{cause}\"\ntest = \"{test}\"\n")
    };
    let all: Vec<String> = super::verbs::EVENTS.iter().map(|name| event(name, "none", "")).collect();
    let f = with(&all);
    f.clean();
    let page = std::fs::read_to_string(f.dir.path().join("docs/verbs.md")).expect("the page was made");
    assert!(page.contains("| `IBV_EVENT_COMM_EST` | no | none |  |"), "{page}");
    assert_at(&with(&all[1..]).only(), "docs/verbs.toml", 0, "IBV_EVENT_CQ_ERR has 0 rows");
    let wrong = |row: String| with(&[&all[1..], &[row]].concat()).only();
    assert_at(&wrong(event("IBV_EVENT_CQ_ERR", "", "")), "docs/verbs.toml", 89, "no test and no reason");
    let elsewhere = wrong(event("IBV_EVENT_CQ_ERR", "", "crates/ibverbs/tests/all.c"));
    assert_at(&elsewhere, "docs/verbs.toml", 89, "is not called");
}

/// A tree with a test of rdma-core's that passes, a line of each kind, a program with two features, and this table of tests.
fn with_suite(rows: &[&str]) -> Fixture {
    let f = Fixture::new();
    f.write("tests/suite/passed-44.txt", "tests.test_x.X.test_y\ntests.test_x.X.test_z\n");
    f.write("tests/programs/src/table.rs", "own(\"prog\", \"-g {gid} -e\", 9)");
    f.write("tests/programs/src/scenario/mod.rs", "scenario(\"play\", HOST, play)");
    f.write("tests/interop/src/table.rs", "own(\"prog\", \"\")");
    f.write("tests/programs/prog.c", "\tFEATURE(a, \"there\", BOTH),\n\t{\"lacking\", f, g, h, 0},\n");
    let rows: String = rows.iter().map(|row| format!("[[row]]\nwhat = \"it\"\n{row}\n")).collect();
    f.write("docs/suite.toml", &rows);
    f.findings();
    f
}

const LINES: &str = "pair = [\"prog/-g,{gid},-e: there\", \"play\"]\nrxe = [\"prog: there\"]";

#[test]
fn a_table_of_tests_that_is_true() {
    let f = with_suite(&[&format!("tests = [\"test_x.*\"]\n{LINES}")]);
    f.clean();
    let page = std::fs::read_to_string(f.dir.path().join("docs/suite.md")).expect("the page was made");
    assert!(page.contains("| test_x.X.test_z | `prog/-g,{gid},-e: there`, `play` | `prog: there` |"), "{page}");
    f.write("docs/suite.md", "old");
    assert_at(&f.only(), "docs/suite.md", 0, "written anew");
}

#[test]
fn a_test_without_a_row_or_with_two() {
    let y = format!("tests = [\"test_x.X.test_y\"]\n{LINES}");
    assert_at(&with_suite(&[&y]).only(), "docs/suite.toml", 0, "test_x.X.test_z passes and is in 0 rows");
    let all = format!("tests = [\"test_x.*\"]\n{LINES}");
    assert_at(&with_suite(&[&y, &all]).only(), "docs/suite.toml", 0, "test_x.X.test_y passes and is in 2 rows");
    let gone = format!("tests = [\"test_x.*\", \"test_w\"]\n{LINES}");
    assert_at(&with_suite(&[&gone]).only(), "docs/suite.toml", 2, "names test_w");
}

#[test]
fn a_row_whose_line_does_not_exist() {
    let wrong = |lines: &str| with_suite(&[&format!("tests = [\"test_x.*\"]\n{lines}")]).only();
    let table = "docs/suite.toml";
    assert_at(&wrong("pair = [\"prog/-g\"]\nno_rxe = \"why\""), table, 2, "names a line prog/-g");
    assert_at(&wrong("pair = [\"player\"]\nno_rxe = \"why\""), table, 2, "names a line player");
    assert_at(&wrong("alone = \"why\"\nrxe = [\"prog/-e\"]"), table, 2, "names a line prog/-e");
    assert_at(&wrong("alone = \"why\"\nrxe = [\"prog: absent\"]"), table, 2, "names absent");
    assert_at(&wrong("alone = \"why\"\nrxe = [\"prog: lacking\"]"), table, 2, "no part of it");
    assert_at(&wrong("alone = \"why\""), table, 2, "`no_rxe`");
    assert_at(&wrong("pair = [\"play\"]\nalone = \"why\"\nno_rxe = \"why\""), table, 2, "`alone`");
}
