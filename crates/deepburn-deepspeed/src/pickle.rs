//! A pickle as a tree of plain nodes, with the order of dicts and the attributes of objects.
//!
//! Main type: [`Pickle`]. A class is represented by its name, and an object by its class, arguments
//! and attributes. Only PyTorch's functions for tensors and sizes are interpreted. Nodes are stored
//! in one table and refer to each other by index. A value that occurs several times is therefore
//! stored once, and a value that contains itself is harmless.

use deepburn_files::safetensors::FloatType;

use crate::pickle_node::{NodeId, PickleNode};
use crate::walker::Walker;

/// A parsed pickle.
#[derive(Debug)]
pub(crate) struct Pickle {
    nodes: Vec<PickleNode>,
    root: NodeId,
}

impl Pickle {
    /// Parses `bytes`. An error names the byte position and the reason.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (nodes, root) = Walker::run(bytes)?;
        Ok(Self { nodes, root })
    }

    /// Returns the root node.
    pub(crate) fn root(&self) -> NodeId {
        self.root
    }

    /// Returns the node with this index.
    pub(crate) fn node(&self, id: NodeId) -> &PickleNode {
        &self.nodes[id as usize]
    }

    /// Returns key, element type and number of elements of every storage.
    pub(crate) fn storages(&self) -> impl Iterator<Item = (&str, Option<FloatType>, usize)> {
        self.nodes.iter().filter_map(|node| match node {
            PickleNode::Storage { key, element, len } => Some((self.text(*key)?, *element, *len)),
            _ => None,
        })
    }

    /// Returns the string of a text node; `None` for other nodes.
    pub(crate) fn text(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            PickleNode::Text(text) => Some(text),
            _ => None,
        }
    }
}
