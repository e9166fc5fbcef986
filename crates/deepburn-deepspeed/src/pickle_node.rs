//! The nodes of a parsed pickle.

use deepburn_files::safetensors::FloatType;

/// The index of a node.
pub(crate) type NodeId = u32;

/// Returns the element type of a storage class; `None` for types that parameters do not have.
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
    /// The [`PickleNode::Storage`].
    pub(crate) storage: NodeId,
    /// The offset of the first element in the storage.
    pub(crate) offset: usize,
    /// The shape, outermost dimension first.
    pub(crate) shape: Vec<usize>,
    /// Whether the elements are in row-major order without gaps. Only such tensors are read.
    pub(crate) contiguous: bool,
}

/// A value of a pickle.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PickleNode {
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
    /// An instance: its class, the list of its arguments, and the dict of its attributes.
    Object {
        class: NodeId,
        arguments: NodeId,
        attributes: Option<NodeId>,
    },
    /// A storage: the node of its archive entry's name, its element type (`None` if parameters do
    /// not support it) and its number of elements.
    Storage {
        key: NodeId,
        element: Option<FloatType>,
        len: usize,
    },
}
