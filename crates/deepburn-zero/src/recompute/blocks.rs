//! Assigns each parameter to a block of the model.
//!
//! Blocks are derived from module paths, so models need no annotations. A number in a path is the
//! index of a list item, and each item of the outermost list is a block:
//!
//! ```text
//!  wte.weight                        no block
//!  h.0.ln_1.gamma                    block 0   "h.0"
//!  h.0.attn.c_attn.weight            block 0
//!  h.1.mlp.2.weight                  block 1   "h.1"; the inner list is ignored
//!  encoder.layers.0.norm.gamma       block 2   "encoder.layers.0"
//!  ln_f.gamma                        no block
//! ```
//!
//! In a model without lists, each child of the root that has parameters is a block, such as `conv1`
//! and `fc`. Parameters directly in the root are outside of all blocks.
//!
//! A block begins at an op that reads a parameter of another block, or the first parameter of its
//! own block again, as in a shared layer. An op before that read belongs to the previous block:
//! Burn's layer norm normalizes before it reads a parameter.

use std::sync::Arc;

/// The block of each parameter, by parameter index.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// The block number of each parameter, in order of first appearance; `None` outside of all
    /// blocks.
    of_parameter: Vec<Option<usize>>,
    /// The path of each block, by number.
    names: Vec<Arc<str>>,
}

impl Blocks {
    /// Finds the blocks of a model. `paths` are the module paths of its parameters, by index.
    pub(crate) fn of<'a>(paths: impl Iterator<Item = &'a str> + Clone) -> Self {
        let has_lists = paths.clone().any(|path| list_item(path).is_some());
        let mut blocks = Self { of_parameter: Vec::new(), names: Vec::new() };
        for path in paths {
            let name = if has_lists { list_item(path) } else { child(path) };
            let number = name.map(|name| blocks.number(name));
            blocks.of_parameter.push(number);
        }
        blocks
    }

    /// Returns the number of the block of a parameter; `None` outside of all blocks.
    pub(crate) fn of_parameter(&self, index: usize) -> Option<usize> {
        self.of_parameter[index]
    }

    /// Returns true if the model has no blocks.
    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns the number of the block called `name`, which is added if it is new.
    fn number(&mut self, name: &str) -> usize {
        let known = self.names.iter().position(|other| **other == *name);
        known.unwrap_or_else(|| {
            self.names.push(name.into());
            self.names.len() - 1
        })
    }
}

/// Returns the names of the parts of a model that a pipeline does not divide, by parameter: its
/// block, or its module if it is outside of all blocks.
pub fn pipeline_units<'a>(paths: impl Iterator<Item = &'a str> + Clone) -> Vec<String> {
    let has_lists = paths.clone().any(|path| list_item(path).is_some());
    let unit = |path: &'a str| {
        let block = if has_lists { list_item(path) } else { child(path) };
        block.or_else(|| path.rsplit_once('.').map(|(module, _)| module)).unwrap_or(path).to_owned()
    };
    paths.map(unit).collect()
}

/// Returns the path up to its first number, such as `h.0` of `h.0.mlp.1.weight`.
fn list_item(path: &str) -> Option<&str> {
    let mut end = 0;
    for part in path.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&path[..end]);
        }
        end += 1;
    }
    None
}

/// Returns the first component of a path; `None` for a parameter of the root.
fn child(path: &str) -> Option<&str> {
    path.split_once('.').map(|(child, _)| child)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(paths: &[&str]) -> Vec<Option<usize>> {
        let blocks = Blocks::of(paths.iter().copied());
        (0..paths.len()).map(|index| blocks.of_parameter(index)).collect()
    }

    #[test]
    fn lists_make_blocks() {
        let paths =
            ["wte.weight", "h.0.ln.gamma", "h.0.mlp.1.weight", "h.1.ln.gamma", "ln_f.gamma"];
        assert_eq!(blocks(&paths), [None, Some(0), Some(0), Some(1), None]);
        let paths = ["enc.layers.0.w", "enc.layers.10.w", "dec.layers.0.w", "enc.layers.0.b"];
        assert_eq!(blocks(&paths), [Some(0), Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn children_are_blocks_where_there_is_no_list() {
        let paths = ["conv1.weight", "conv1.bias", "fc.weight", "scale"];
        assert_eq!(blocks(&paths), [Some(0), Some(0), Some(1), None]);
    }
}
