//! Dependency arrows between the crates of the workspace point down only (invariant of the layout).

use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata};

use super::Finding;

/// The layers, lowest first. A crate may depend on crates of lower layers; crates in one layer do not know each other.
/// The lowest holds readers of recordings for the tests of all others.
const LAYERS: &[&[&str]] = &[
    &["ferroce-testkit"],
    &["ferroce-wire", "ferroce-abi", "ferroce-rsocket"],
    &["ferroce-transport", "ferroce-cm"],
    &["ferroce-core"],
    &["ferroce-link"],
    &["ferroce-engine"],
    &["ferroce-service"],
    &["ferroce"],
    &["ferroce-ibverbs", "ferroce-rdmacm", "ferroce-preload"],
    &["ferroce-cli"],
];

/// Crates outside the layers: tools and whole-stack tests. Only they may depend on each other.
const OUTSIDE: &[&str] =
    &["xtask", "hostile-tests", "program-tests", "interop-tests", "ferroce-conformance", "ferroce-sim"];

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|names| names.contains(&name))
}

pub(super) fn check(metadata: &Metadata, root: &Path) -> Vec<Finding> {
    let members: Vec<_> = metadata.workspace_packages();
    let mut findings = Vec::new();
    for package in &members {
        let manifest = package.manifest_path.as_std_path();
        let path = manifest.strip_prefix(root).unwrap_or(manifest).to_path_buf();
        let mut report = |what: String| findings.push(Finding { path: path.clone(), line: 0, what });
        let name = package.name.as_str();
        let outside = OUTSIDE.contains(&name);
        let own = layer(name);
        if own.is_none() && !outside {
            report(format!("crate `{name}` has no layer: add it to LAYERS in xtask/src/checks/layers.rs"));
            continue;
        }
        for dependency in &package.dependencies {
            // Tests may use their own crate with other features.
            let own_tests = dependency.name == name && dependency.kind == DependencyKind::Development;
            if own_tests || !members.iter().any(|p| p.name.as_str() == dependency.name) {
                continue;
            }
            let to = dependency.name.as_str();
            match (own, layer(to)) {
                (Some(_), None) => report(format!("`{name}` depends on `{to}`, which is a tool and no library")),
                (Some(from), Some(below)) if below >= from => report(format!(
                    "`{name}` depends on `{to}`, which is not below it: arrows point down only ({})",
                    order()
                )),
                _ => {}
            }
        }
    }
    findings
}

fn order() -> String {
    LAYERS.iter().map(|names| names.join("/")).collect::<Vec<_>>().join(" < ")
}
