//! A pickle as a tree of plain nodes, with the order of dicts and the
//! attributes of objects.
//!
//! Main type: [`Pickle`]. A class is represented by its name, and an object by
//! its class, arguments and attributes. Only PyTorch's functions for tensors
//! and sizes are interpreted. Nodes are in one table and refer to each other by
//! index, so shared values are shared, and a value that contains itself is
//! harmless.

use deepburn_safetensors::FloatType;

use crate::walker::Walker;

/// The index of a node.
pub(crate) type NodeId = u32;

/// Returns the element type of a storage class; `None` for types that
/// parameters do not have.
pub(crate) fn float_of_storage(class: (&str, &str)) -> Option<FloatType> {
    match class {
        ("torch", "FloatStorage") => Some(FloatType::F32),
        ("torch", "HalfStorage") => Some(FloatType::F16),
        ("torch", "BFloat16Storage") => Some(FloatType::Bf16),
        _ => None,
    }
}

/// A tensor: a view of a storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorNode {
    /// The [`Node::Storage`].
    pub(crate) storage: NodeId,
    /// The offset of the first element in the storage.
    pub(crate) offset: usize,
    /// The shape, outermost dimension first.
    pub(crate) shape: Vec<usize>,
    /// Whether the elements are in row-major order without gaps. Only such
    /// tensors are read.
    pub(crate) contiguous: bool,
}

/// A value of a pickle.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    /// Bytes, and integers of more than 64 bits, which are never used.
    Opaque,
    /// A list, tuple, set or size.
    List(Vec<NodeId>),
    /// A dict in insertion order.
    Dict(Vec<(NodeId, NodeId)>),
    Tensor(Box<TensorNode>),
    /// A class or function: the nodes of its module name and its name.
    Class(NodeId, NodeId),
    /// An instance: its class, the list of its arguments, and the dict of its
    /// attributes.
    Object {
        class: NodeId,
        arguments: NodeId,
        attributes: Option<NodeId>,
    },
    /// A storage: the node of its archive entry's name, its element type
    /// (`None` if parameters do not support it) and its number of elements.
    Storage {
        key: NodeId,
        element: Option<FloatType>,
        len: usize,
    },
}

/// A parsed pickle.
#[derive(Debug)]
pub(crate) struct Pickle {
    nodes: Vec<Node>,
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
    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    /// Returns key, element type and number of elements of every storage.
    pub(crate) fn storages(&self) -> impl Iterator<Item = (&str, Option<FloatType>, usize)> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Storage { key, element, len } => Some((self.text(*key)?, *element, *len)),
            _ => None,
        })
    }

    /// Returns the string of a text node; `None` for other nodes.
    pub(crate) fn text(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }
}
