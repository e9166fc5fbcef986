//! Which block of a model each parameter belongs to.
//!
//! A block is what a number in the module paths names: `h.3` of `h.3.attn.c_attn.weight`, `layers.0` of
//! `encoder.layers.0.norm.gamma` with all before it. Of nested lists the outer one counts. A model without
//! lists has a block for each child of the root that has parameters.

use std::sync::Arc;

/// The block of each parameter, by index.
#[derive(Debug)]
pub(crate) struct Blocks {
    /// Numbers in the order in which blocks come in the model; `None` outside of all blocks.
    of_parameter: Vec<Option<usize>>,
    names: Vec<Arc<str>>,
}

impl Blocks {
    /// The blocks of a model whose parameters have these paths.
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

    /// The block of a parameter.
    pub(crate) fn of_parameter(&self, index: usize) -> Option<usize> {
        self.of_parameter[index]
    }

    /// Whether no parameter belongs to a block.
    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    fn number(&mut self, name: &str) -> usize {
        let known = self.names.iter().position(|other| **other == *name);
        known.unwrap_or_else(|| {
            self.names.push(name.into());
            self.names.len() - 1
        })
    }
}

/// The path up to its first number.
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

/// The child of the root, of a path that goes further.
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
