//! The module tree, built from the module paths of the entries.
//!
//! A node stores the counts of its module without submodules, like the entries. Sums over
//! submodules are computed on demand, because models have few modules.

use super::{FlopsTotals, ModuleFlops};
use std::fmt;

/// A module with its own counts and its submodules in order of their entries.
#[derive(Debug, Clone)]
pub(super) struct ModuleNode {
    /// The last part of the path; the model's name for the root.
    name: String,
    /// The counts of the module without its submodules.
    own: FlopsTotals,
    /// The submodules, in the order of their first entries.
    children: Vec<ModuleNode>,
}

impl ModuleNode {
    /// Returns a module without counts and submodules.
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), own: FlopsTotals::default(), children: Vec::new() }
    }

    /// Returns the submodule `name`, which is created if it does not exist.
    pub(super) fn child(&mut self, name: &str) -> &mut Self {
        // A module has few children, and their order is the order of the model.
        let place = self.children.iter().position(|child| child.name == name);
        let place = place.unwrap_or_else(|| {
            self.children.push(Self::new(name));
            self.children.len() - 1
        });
        &mut self.children[place]
    }

    /// Adds an entry to the module's own counts.
    pub(super) fn add(&mut self, entry: &ModuleFlops) {
        self.own = FlopsTotals {
            parameters: self.own.parameters.saturating_add(entry.parameters),
            forward: self.own.forward.saturating_add(entry.forward),
            backward: self.own.backward.saturating_add(entry.backward),
        };
    }

    /// Returns the sums over this module and its submodules.
    pub(super) fn totals(&self) -> FlopsTotals {
        self.children.iter().map(Self::totals).fold(self.own, |sum, child| FlopsTotals {
            parameters: sum.parameters.saturating_add(child.parameters),
            forward: sum.forward.saturating_add(child.forward),
            backward: sum.backward.saturating_add(child.backward),
        })
    }

    /// Returns the modules of each depth with their full paths; depth 0 is this module.
    pub(super) fn levels(&self) -> Vec<Vec<(String, FlopsTotals)>> {
        let mut levels = Vec::new();
        self.collect_levels(0, "", &mut levels);
        levels
    }

    /// Adds this module and its submodules to `levels`. `prefix` is the path of its parent with a
    /// dot.
    fn collect_levels(
        &self,
        depth: usize,
        prefix: &str,
        levels: &mut Vec<Vec<(String, FlopsTotals)>>,
    ) {
        if levels.len() == depth {
            levels.push(Vec::new());
        }
        let path = format!("{prefix}{}", self.name);
        // Paths do not contain the name of the model.
        let prefix = if depth == 0 { String::new() } else { format!("{path}.") };
        levels[depth].push((path, self.totals()));
        for child in &self.children {
            child.collect_levels(depth + 1, &prefix, levels);
        }
    }

    /// Calls `show` for every module, parents first.
    ///
    /// # Errors
    /// Returns the first error of `show`.
    pub(super) fn visit(
        &self,
        depth: usize,
        show: &mut impl FnMut(usize, &str, FlopsTotals) -> fmt::Result,
    ) -> fmt::Result {
        show(depth, &self.name, self.totals())?;
        self.children.iter().try_for_each(|child| child.visit(depth + 1, show))
    }
}
