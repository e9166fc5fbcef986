//! A pickle as a tree of plain nodes, which keeps the order of dicts and the attributes of objects.
//!
//! Main type: [`Pickle`]. A class is its name, an object what it was made of; of PyTorch's functions
//! those are understood that make tensors and sizes. Nodes lie in one table and refer to each other
//! by index, so that shared values are shared and a value that contains itself does no harm.

use crate::walker::Walker;

/// Index of a node.
pub(crate) type NodeId = u32;

/// Types that PyTorch's storages may have and parameters too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementType {
    F32,
    F16,
    Bf16,
}

impl ElementType {
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    pub(crate) fn of_storage(class: (&str, &str)) -> Option<Self> {
        match class {
            ("torch", "FloatStorage") => Some(Self::F32),
            ("torch", "HalfStorage") => Some(Self::F16),
            ("torch", "BFloat16Storage") => Some(Self::Bf16),
            _ => None,
        }
    }
}

/// Elements of a storage that a tensor is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorNode {
    /// A [`Node::Storage`].
    pub(crate) storage: NodeId,
    /// Elements of it before the first one.
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
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
    /// Bytes, and integers beyond 64 bits: nothing that is asked for.
    Opaque,
    /// A list, tuple, set or size.
    List(Vec<NodeId>),
    /// A dict, in its order.
    Dict(Vec<(NodeId, NodeId)>),
    Tensor(Box<TensorNode>),
    /// A class or function: the texts of its module and its name.
    Class(NodeId, NodeId),
    /// An instance: its class, the list it was called with, and the dict of its attributes.
    Object {
        class: NodeId,
        arguments: NodeId,
        attributes: Option<NodeId>,
    },
    /// What a persistent identifier says: the text of its archive entry's name, its element type
    /// (`None` where no parameter has it) and number.
    Storage {
        key: NodeId,
        element: Option<ElementType>,
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
    /// Parses `bytes`; an error says at which byte and why.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (nodes, root) = Walker::run(bytes)?;
        Ok(Self { nodes, root })
    }

    pub(crate) fn root(&self) -> NodeId {
        self.root
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    /// Key, element type and number of elements of every storage.
    pub(crate) fn storages(&self) -> impl Iterator<Item = (&str, Option<ElementType>, usize)> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Storage { key, element, len } => Some((self.text(*key)?, *element, *len)),
            _ => None,
        })
    }

    /// The text of a node that is one.
    pub(crate) fn text(&self, id: NodeId) -> Option<&str> {
        match self.node(id) {
            Node::Text(text) => Some(text),
            _ => None,
        }
    }
}
