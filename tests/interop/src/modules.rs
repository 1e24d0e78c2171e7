//! Kernel modules: which must be loaded before which.

use std::collections::HashMap;

/// `modules.dep` of depmod: what each module needs, in paths below the folder of the kernel's modules.
#[derive(Debug, Default)]
pub struct Dependencies {
    needs: HashMap<String, Vec<String>>,
}

impl Dependencies {
    /// Reads `modules.dep`.
    pub fn parse(text: &str) -> Dependencies {
        let needs = text
            .lines()
            .filter_map(|line| {
                let (path, needed) = line.split_once(':')?;
                Some((path.to_owned(), needed.split_whitespace().map(str::to_owned).collect()))
            })
            .collect();
        Dependencies { needs }
    }

    /// The path of the module `name` (`virtio_net`); `None` if it is not among them, most often since it is built in.
    pub fn find(&self, name: &str) -> Option<&str> {
        let is_it = |path: &&String| {
            let file = path.rsplit('/').next().unwrap_or(path);
            // Names have underscores, files may have hyphens.
            file.split('.').next().unwrap_or(file).replace('-', "_") == name
        };
        self.needs.keys().find(is_it).map(String::as_str)
    }

    /// Paths in an order in which they can be loaded, so that all of `names` are; unknown names are left out.
    pub fn load_order(&self, names: &[&str]) -> Vec<String> {
        let mut order: Vec<String> = Vec::new();
        for path in names.iter().filter_map(|name| self.find(name)) {
            // depmod lists what is needed most deeply last.
            let needed = self.needs[path].iter().rev().map(String::as_str);
            for path in needed.chain([path]) {
                if !order.iter().any(|known| known == path) {
                    order.push(path.to_owned());
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "\
kernel/core/ib_core.ko.xz:
kernel/core/ib_uverbs.ko.xz: kernel/core/ib_core.ko.xz
kernel/rxe/rdma_rxe.ko.xz: kernel/net/udp-tunnel.ko.xz kernel/core/ib_uverbs.ko.xz kernel/core/ib_core.ko.xz
kernel/net/udp-tunnel.ko.xz:
";

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let order = Dependencies::parse(DEP).load_order(&["ib_uverbs", "built_in", "rdma_rxe"]);
        let names: Vec<&str> = order.iter().map(|path| path.rsplit('/').next().expect("has a name")).collect();
        assert_eq!(names, ["ib_core.ko.xz", "ib_uverbs.ko.xz", "udp-tunnel.ko.xz", "rdma_rxe.ko.xz"]);
    }

    #[test]
    fn names_are_found_by_file_with_hyphens() {
        let modules = Dependencies::parse(DEP);
        assert_eq!(modules.find("udp_tunnel"), Some("kernel/net/udp-tunnel.ko.xz"));
        assert_eq!(modules.find("virtio_console"), None);
    }
}
