//! A parser of Python's pickle opcodes, as `torch.save` writes them: protocol 2, and the additions
//! of newer protocols.
//!
//! Main type: [`Walker`], a stack machine. Nothing is ever called or imported. Memory and time are
//! bounded by the length of the pickle, because no value is copied and there are no jumps. Opcodes
//! of text protocols and of registered extensions are rejected with an error that names them.
//!
//! A pickle is a program for a machine with a stack and a memo. An opcode is one byte, followed by
//! its operands. Opcodes push values, collect the values above a mark into a list or dict, store
//! values in the memo and push them again, or call a function with a tuple of arguments. For a
//! tensor, `torch.save` writes opcodes like these:
//!
//! ```text
//! c torch._utils _rebuild_tensor_v2     push a function
//! ( (                                   two marks: of the arguments, of the storage's identifier
//! X "storage"  c torch FloatStorage  X "0"  X "cpu"  K 12   t  Q    push storage 0 of 12 elements
//! K 0  K 3 K 4 0x86  K 4 K 1 0x86  …  t                     offset, shape, strides, …
//! R                                     call: becomes a tensor node
//! ```
//!
//! A call becomes a node that describes what the call would return. The meaning of opcodes is
//! documented in Python's `pickletools`.

use std::collections::HashMap;

use crate::pickle_node::{NodeId, PickleNode, TensorNode, float_of_storage};

/// The largest number of dimensions, which is also PyTorch's limit.
const MAX_DIMS: usize = 64;

/// An item of the stack: a value, or the mark at the start of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
enum StackItem {
    /// The start of a group of values.
    Mark,
    /// A value: the index of its node.
    Value(NodeId),
}

/// Converts opcodes to nodes.
pub(crate) struct Walker<'a> {
    /// The whole pickle.
    bytes: &'a [u8],
    /// The position of the next byte to read.
    at: usize,
    /// All nodes so far. Nodes are never removed, so an index stays valid.
    nodes: Vec<PickleNode>,
    /// The machine's stack.
    stack: Vec<StackItem>,
    /// The values that the pickle can refer to again, by their number.
    memo: HashMap<u32, NodeId>,
}

impl<'a> Walker<'a> {
    /// Parses a pickle and returns all nodes and the root. An error names the byte position and the
    /// reason.
    ///
    /// A value that occurs several times through the memo has one node, so the nodes form a graph
    /// and not a tree.
    pub(crate) fn run(bytes: &'a [u8]) -> Result<(Vec<PickleNode>, NodeId), String> {
        let mut walker = Self { bytes, at: 0, nodes: vec![], stack: vec![], memo: HashMap::new() };
        let root = walker.walk().map_err(|reason| format!("{reason} at byte {}", walker.at))?;
        Ok((walker.nodes, root))
    }

    /// Executes opcodes until the end of the pickle and returns the root.
    fn walk(&mut self) -> Result<NodeId, String> {
        loop {
            let opcode = self.byte()?;
            if opcode == b'.' {
                return self.pop();
            }
            self.step(opcode)?;
        }
    }

    /// Executes one opcode.
    ///
    /// # Errors
    /// Returns an error for an opcode that `torch.save` does not write, or one whose operands are
    /// missing on the stack.
    fn step(&mut self, opcode: u8) -> Result<(), String> {
        // The protocol and the length of a frame do not matter: opcodes follow one another in any
        // case.
        match opcode {
            0x80 => drop(self.byte()?),                             // PROTO
            0x95 => drop(self.take(8)?),                            // FRAME
            b'(' => self.stack.push(StackItem::Mark),               // MARK
            b'0' => drop(self.pop()?),                              // POP
            b'1' => drop(self.pop_to_mark()?),                      // POP_MARK
            b'2' => self.stack.push(StackItem::Value(self.top()?)), // DUP
            b'q' | b'r' | 0x94 => self.memoize(opcode)?,
            b'h' | b'j' => self.recall(opcode)?,
            b'N' | 0x88 | 0x89 | b'J' | b'K' | b'M' | 0x8a | 0x8b | b'G' => self.scalar(opcode)?,
            b'X' | 0x8c | 0x8d | b'T' | b'U' | b'B' | b'C' | 0x8e | 0x96 => self.text(opcode)?,
            b']' | b')' | b'}' | 0x8f | b'l' | b't' | b'd' | 0x91 | 0x85..=0x87 => {
                self.container(opcode)?;
            }
            b'a' | b'e' | 0x90 | b's' | b'u' => self.fill(opcode)?,
            b'c' | 0x93 => self.class(opcode)?,
            b'R' | 0x81 | 0x92 => self.call(opcode)?,
            b'b' => self.build()?,
            b'Q' => self.persistent()?,
            _ => {
                return Err(format!(
                    "unexpected pickle opcode {}, which torch.save never writes,",
                    name(opcode)
                ));
            }
        }
        Ok(())
    }

    // Reading bytes.

    /// Consumes `len` bytes.
    ///
    /// # Errors
    /// Returns an error if the pickle has fewer bytes left.
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or("the pickle ends too early")?;
        self.at += len;
        Ok(taken)
    }

    /// Consumes one byte.
    fn byte(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    /// Consumes a little-endian unsigned integer of up to 8 bytes.
    fn number(&mut self, len: usize) -> Result<u64, String> {
        Ok(self.take(len)?.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
    }

    /// Consumes bytes after their length, an integer of `len_bytes` bytes. The length is checked
    /// against the rest of the pickle before anything is allocated.
    fn counted(&mut self, len_bytes: usize) -> Result<&'a [u8], String> {
        let len = self.number(len_bytes)?;
        self.take(usize::try_from(len).map_err(|_| "a length is beyond memory")?)
    }

    /// Consumes a line of text.
    fn line(&mut self) -> Result<String, String> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or("a name has no end")?;
        let line = self.take(len)?;
        self.byte()?;
        utf8(line)
    }

    // Stack operations.

    /// Adds a node and pushes it.
    fn push(&mut self, node: PickleNode) -> Result<(), String> {
        let id = NodeId::try_from(self.nodes.len()).map_err(|_| "there are too many values")?;
        self.nodes.push(node);
        self.stack.push(StackItem::Value(id));
        Ok(())
    }

    /// Pops a value.
    ///
    /// # Errors
    /// Returns an error if the stack is empty or a mark is on top.
    fn pop(&mut self) -> Result<NodeId, String> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// Returns the top value.
    fn top(&self) -> Result<NodeId, String> {
        match self.stack.last() {
            Some(StackItem::Value(id)) => Ok(*id),
            Some(StackItem::Mark) | None => Err("a value is missing".to_owned()),
        }
    }

    /// Pops all values down to the last mark.
    ///
    /// # Errors
    /// Returns an error if there is no mark.
    fn pop_to_mark(&mut self) -> Result<Vec<NodeId>, String> {
        let mark = self.stack.iter().rposition(|item| *item == StackItem::Mark);
        let group = self.stack.split_off(mark.ok_or("a mark is missing")?);
        let values = group.into_iter().filter_map(|item| match item {
            StackItem::Value(id) => Some(id),
            StackItem::Mark => None,
        });
        Ok(values.collect())
    }

    /// Stores the top value in the memo. The number is the operand, or the next free number for
    /// MEMOIZE (0x94).
    fn memoize(&mut self, opcode: u8) -> Result<(), String> {
        let index = match opcode {
            b'q' => self.number(1)? as u32,
            b'r' => self.number(4)? as u32,
            // As in Python, MEMOIZE counts the values in the memo.
            _ => u32::try_from(self.memo.len()).map_err(|_| "the memo is too long")?,
        };
        let top = self.top()?;
        self.memo.insert(index, top);
        Ok(())
    }

    /// Pushes a value from the memo.
    fn recall(&mut self, opcode: u8) -> Result<(), String> {
        let index = self.number(if opcode == b'h' { 1 } else { 4 })? as u32;
        let id = *self.memo.get(&index).ok_or_else(|| format!("memo {index} is empty"))?;
        self.stack.push(StackItem::Value(id));
        Ok(())
    }

    // Opcodes of values.

    /// Pushes a scalar. Floats are big-endian, integers little-endian.
    fn scalar(&mut self, opcode: u8) -> Result<(), String> {
        let node = match opcode {
            b'N' => PickleNode::None,
            0x88 => PickleNode::Bool(true),
            0x89 => PickleNode::Bool(false),
            b'J' => PickleNode::Int(i64::from(self.number(4)? as u32 as i32)),
            b'K' => PickleNode::Int(self.number(1)? as i64),
            b'M' => PickleNode::Int(self.number(2)? as i64),
            0x8a => long(self.counted(1)?),
            0x8b => long(self.counted(4)?),
            _ => PickleNode::Float(f64::from_bits(self.number(8)?.swap_bytes())),
        };
        self.push(node)
    }

    /// Pushes a string, or an opaque node for bytes, whose contents are never used.
    fn text(&mut self, opcode: u8) -> Result<(), String> {
        let bytes = self.counted(match opcode {
            b'U' | 0x8c | b'C' => 1,
            b'X' | b'T' | b'B' => 4,
            _ => 8,
        })?;
        // Names and keys are UTF-8. Other strings are never used, so they are not decoded.
        let is_text = matches!(opcode, b'U' | 0x8c | b'X' | b'T' | 0x8d);
        self.push(if is_text {
            utf8(bytes).map_or(PickleNode::Opaque, PickleNode::Text)
        } else {
            PickleNode::Opaque
        })
    }

    /// Pushes a list, tuple, dict or set.
    fn container(&mut self, opcode: u8) -> Result<(), String> {
        let node = match opcode {
            b']' | b')' | 0x8f => PickleNode::List(vec![]),
            b'}' => PickleNode::Dict(vec![]),
            b'd' => PickleNode::Dict(pairs(&self.pop_to_mark()?)?),
            0x85..=0x87 => {
                let len = usize::from(opcode - 0x84);
                let mut items = (0..len).map(|_| self.pop()).collect::<Result<Vec<_>, _>>()?;
                items.reverse();
                PickleNode::List(items)
            }
            _ => PickleNode::List(self.pop_to_mark()?),
        };
        self.push(node)
    }

    /// Adds items to a list, set or dict.
    ///
    /// # Errors
    /// Returns an error if the value below the items is not a container of their kind.
    fn fill(&mut self, opcode: u8) -> Result<(), String> {
        let items = match opcode {
            b'a' => vec![self.pop()?],
            b's' => {
                let value = self.pop()?;
                vec![self.pop()?, value]
            }
            _ => self.pop_to_mark()?,
        };
        let top = self.top()? as usize;
        match (&mut self.nodes[top], opcode) {
            (PickleNode::List(list), b'a' | b'e' | 0x90) => list.extend(items),
            (PickleNode::Dict(dict), b's' | b'u') => dict.extend(pairs(&items)?),
            // Items of a class that is derived from list or dict are never used.
            (PickleNode::Object { .. }, _) => {}
            _ => return Err("items are added to what has none".to_owned()),
        }
        Ok(())
    }

    /// Pushes a class. GLOBAL (`c`) has the names as lines of text; STACK_GLOBAL (0x93) takes them
    /// from the stack.
    fn class(&mut self, opcode: u8) -> Result<(), String> {
        if opcode == b'c' {
            for _ in 0..2 {
                let line = self.line()?;
                self.push(PickleNode::Text(line))?;
            }
        }
        let name = self.pop()?;
        let module = self.pop()?;
        let texts = (&self.nodes[module as usize], &self.nodes[name as usize]);
        let (PickleNode::Text(_), PickleNode::Text(_)) = texts else {
            return Err("a class has no name".to_owned());
        };
        self.push(PickleNode::Class(module, name))
    }

    /// Calls a class or function with arguments: REDUCE, NEWOBJ and NEWOBJ_EX. Creates the node
    /// that the call would return.
    ///
    /// # Errors
    /// Returns an error if the called value is not a class, or the arguments are not a tuple of the
    /// expected form. An unknown class is not an error: the call becomes an object.
    fn call(&mut self, opcode: u8) -> Result<(), String> {
        // NEWOBJ_EX also has a dict of keyword arguments, on top of the others.
        if opcode == 0x92 {
            self.pop()?;
        }
        let (mut arguments, mut callee) = (self.pop()?, self.pop()?);
        if self.class_name(callee) == Some(("torch._tensor", "_rebuild_from_type_v2")) {
            // A tensor with attributes: its arguments are the constructor, the type, the
            // constructor's arguments and the state.
            let PickleNode::List(list) = &self.nodes[arguments as usize] else {
                return Err("a tensor has no arguments".to_owned());
            };
            let &[function, _, inner, _] = &list[..] else {
                return Err("a tensor with attributes does not have four arguments".to_owned());
            };
            (callee, arguments) = (function, inner);
        }
        let Some(class) = self.class_name(callee) else {
            return Err("call of an object that is not a class".to_owned());
        };
        let PickleNode::List(list) = &self.nodes[arguments as usize] else {
            return Err(format!("{}.{} is called without arguments", class.0, class.1));
        };
        let node = match class {
            ("collections", "OrderedDict") if list.is_empty() => PickleNode::Dict(vec![]),
            // The argument is the factory of missing values. The items are set by later opcodes.
            ("collections", "defaultdict") => PickleNode::Dict(vec![]),
            ("torch", "Size") | ("torch._utils", "_rebuild_parameter") => {
                // A size is represented by its tuple, a parameter by its tensor.
                let inner = *list.first().ok_or("a size or parameter has no value")?;
                self.stack.push(StackItem::Value(inner));
                return Ok(());
            }
            ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => {
                PickleNode::Tensor(Box::new(self.tensor(list)?))
            }
            _ => PickleNode::Object { class: callee, arguments, attributes: None },
        };
        self.push(node)
    }

    /// Returns module and name of a class.
    fn class_name(&self, id: NodeId) -> Option<(&str, &str)> {
        let PickleNode::Class(module, name) = self.nodes[id as usize] else { return None };
        match (&self.nodes[module as usize], &self.nodes[name as usize]) {
            (PickleNode::Text(module), PickleNode::Text(name)) => Some((module, name)),
            _ => None,
        }
    }

    /// Sets the attributes of an object.
    fn build(&mut self) -> Result<(), String> {
        let state = self.pop()?;
        let top = self.top()? as usize;
        // Attributes of dicts, such as the versions of a state dict, are never used.
        if let PickleNode::Object { attributes, .. } = &mut self.nodes[top] {
            *attributes = Some(state);
        }
        Ok(())
    }

    // PyTorch's objects.

    /// Pushes the storage of a persistent id,
    /// `('storage', class, key, device, number of elements)`.
    ///
    /// # Errors
    /// Returns an error for another form of identifier, which DeepSpeed's files do not contain.
    fn persistent(&mut self) -> Result<(), String> {
        let id = self.pop()?;
        let PickleNode::List(parts) = &self.nodes[id as usize] else {
            return Err("a persistent identifier is not a tuple".to_owned());
        };
        let &[kind, class, key, _, len] = &parts[..] else {
            return Err("a persistent identifier does not have five parts".to_owned());
        };
        // The class of a storage gives the element type: `torch.FloatStorage` and so on. The device
        // does not matter.
        let class = self.class_name(class);
        let node = |id: NodeId| &self.nodes[id as usize];
        let (PickleNode::Text(kind), Some(class), PickleNode::Text(_), PickleNode::Int(len)) =
            (node(kind), class, node(key), node(len))
        else {
            return Err("a persistent identifier does not name a storage".to_owned());
        };
        let len = usize::try_from(*len).map_err(|_| format!("a storage has {len} elements"))?;
        if kind != "storage" {
            return Err("a persistent identifier is not a storage identifier".to_owned());
        }
        // Storages of other types are kept, too: DeepSpeed's files also have integers and bools.
        let element = float_of_storage(class);
        self.push(PickleNode::Storage { key, element, len })
    }

    /// Returns the tensor that a call of `torch._utils._rebuild_tensor` or `_rebuild_tensor_v2`
    /// would create, after checking its bounds.
    ///
    /// `arguments` are the storage, the offset of the first element, shape and strides, and further
    /// ones that are not needed. A tensor is contiguous if each stride is the product of the
    /// dimensions after it; strides of dimensions of size 1 do not matter.
    ///
    /// # Errors
    /// Returns an error for arguments of another kind, or a contiguous tensor that exceeds its
    /// storage.
    fn tensor(&self, arguments: &[NodeId]) -> Result<TensorNode, String> {
        let [storage, offset, shape, strides, ..] = arguments else {
            return Err("a tensor has too few arguments".to_owned());
        };
        let PickleNode::Storage { len, .. } = &self.nodes[*storage as usize] else {
            return Err("a tensor has no storage".to_owned());
        };
        let PickleNode::Int(offset) = self.nodes[*offset as usize] else {
            return Err("a tensor has no offset".to_owned());
        };
        let offset = usize::try_from(offset).map_err(|_| "a tensor's offset is negative")?;
        let (shape, strides) = (self.dims(*shape)?, self.dims(*strides)?);
        if shape.len() != strides.len() {
            return Err(format!("a tensor of shape {shape:?} has the strides {strides:?}"));
        }
        let numel = shape.iter().try_fold(1_usize, |all, dim| all.checked_mul(*dim));
        let numel = numel.ok_or_else(|| format!("a tensor of shape {shape:?} is beyond memory"))?;
        let mut expected = 1_usize;
        let mut contiguous = true;
        // Strides are checked from the last dimension to the first: in row-major order, a stride is
        // the product of the later dimensions.
        for (dim, stride) in shape.iter().zip(&strides).rev() {
            contiguous &= *dim <= 1 || *stride == expected;
            expected = expected.saturating_mul((*dim).max(1));
        }
        contiguous |= numel == 0;
        if contiguous && offset.checked_add(numel).is_none_or(|end| end > *len) {
            return Err(format!(
                "a tensor of shape {shape:?} from {offset} on exceeds its storage"
            ));
        }
        Ok(TensorNode { storage: *storage, offset, shape, contiguous })
    }

    /// Returns a list of dimensions.
    ///
    /// # Errors
    /// Returns an error for other values than sizes, or for too many of them.
    fn dims(&self, id: NodeId) -> Result<Vec<usize>, String> {
        let PickleNode::List(dims) = &self.nodes[id as usize] else {
            return Err("a shape is not a tuple".to_owned());
        };
        if dims.len() > MAX_DIMS {
            return Err(format!("a shape has {} dimensions", dims.len()));
        }
        let dims = dims.iter().map(|dim| match self.nodes[*dim as usize] {
            PickleNode::Int(dim) => usize::try_from(dim).ok(),
            _ => None,
        });
        dims.collect::<Option<_>>().ok_or_else(|| "a shape has other parts than sizes".to_owned())
    }
}

/// Groups items into keys and values.
///
/// # Errors
/// Returns an error for an odd number of items.
fn pairs(items: &[NodeId]) -> Result<Vec<(NodeId, NodeId)>, String> {
    let (pairs, rest) = items.as_chunks::<2>();
    if !rest.is_empty() {
        return Err("a dict has a key without a value".to_owned());
    }
    Ok(pairs.iter().map(|[key, value]| (*key, *value)).collect())
}

/// Converts a little-endian two's complement integer of any length. Integers of more than 64 bits
/// become opaque nodes, because none of the values that are used is that large.
fn long(bytes: &[u8]) -> PickleNode {
    if bytes.len() > 8 {
        return PickleNode::Opaque;
    }
    let sign = bytes.last().is_some_and(|last| last & 0x80 != 0);
    // Starting from -1, whose bits are all set, keeps the sign when bytes are shifted in from the
    // right.
    let start = if sign { -1 } else { 0 };
    PickleNode::Int(bytes.iter().rev().fold(start, |all: i64, byte| all << 8 | i64::from(*byte)))
}

/// Converts bytes to a string.
///
/// # Errors
/// Returns an error for bytes that are not UTF-8.
fn utf8(bytes: &[u8]) -> Result<String, String> {
    String::from_utf8(bytes.to_owned()).map_err(|_| "a name is not UTF-8".to_owned())
}

/// Formats an opcode for an error message.
fn name(opcode: u8) -> String {
    if opcode.is_ascii_graphic() {
        format!("`{}` ({opcode:#04x})", char::from(opcode))
    } else {
        format!("{opcode:#04x}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use deepburn_files::safetensors::FloatType;

    use super::*;
    use crate::pickle::Pickle;

    /// `('storage', torch.FloatStorage, '7', 'cpu', 6)` as a persistent identifier.
    const STORAGE: &[u8] = b"(U\x07storagectorch\nFloatStorage\nU\x017U\x03cpuK\x06tQ";

    fn parse(bytes: &[u8]) -> Pickle {
        Pickle::parse(bytes).unwrap()
    }

    fn error(bytes: &[u8]) -> String {
        Pickle::parse(bytes).unwrap_err()
    }

    /// Returns a pickle of a tensor on [`STORAGE`] with this offset, shape and strides.
    fn tensor(offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
        let tuple = |dims: &[u8]| {
            let dims = dims.iter().flat_map(|dim| [b'K', *dim]);
            [b'('].into_iter().chain(dims).chain([b't']).collect::<Vec<_>>()
        };
        let function = b"ctorch._utils\n_rebuild_tensor_v2\n(";
        let (shape, strides) = (tuple(shape), tuple(strides));
        [&function[..], STORAGE, &[b'K', offset], &shape, &strides, b"\x89NtR."].concat()
    }

    #[test]
    fn scalars_have_their_values() {
        let scalar = |bytes: &[u8]| parse(bytes).node(parse(bytes).root()).clone();
        assert_eq!(scalar(b"\x80\x02N."), PickleNode::None);
        assert_eq!(scalar(b"\x88."), PickleNode::Bool(true));
        assert_eq!(scalar(b"K\xff."), PickleNode::Int(255));
        assert_eq!(scalar(b"M\x00\x01."), PickleNode::Int(256));
        assert_eq!(scalar(b"J\xff\xff\xff\xff."), PickleNode::Int(-1));
        assert_eq!(scalar(b"\x8a\x00."), PickleNode::Int(0));
        assert_eq!(scalar(b"\x8a\x01\xff."), PickleNode::Int(-1));
        assert_eq!(scalar(b"\x8a\x05\x00\x00\x00\x00\x01."), PickleNode::Int(1 << 32));
        assert_eq!(scalar(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."), PickleNode::Opaque);
        assert_eq!(scalar(b"G\x3f\xf8\x00\x00\x00\x00\x00\x00."), PickleNode::Float(1.5));
        assert_eq!(scalar(b"X\x02\x00\x00\x00ab."), PickleNode::Text("ab".to_owned()));
        assert_eq!(scalar(b"\x8c\x02ab."), PickleNode::Text("ab".to_owned()));
        assert_eq!(scalar(b"C\x02ab."), PickleNode::Opaque);
        assert_eq!(scalar(b"\x95\x01\x00\x00\x00\x00\x00\x00\x00N."), PickleNode::None);
    }

    #[test]
    fn dicts_keep_their_order_and_shared_lists_their_items() {
        // {"b": list, "a": list} with one list [1], which is filled after it was stored in the
        // memo.
        let pickle = parse(b"}q\x00(U\x01b]q\x01K\x01aU\x01ah\x01u.");
        let PickleNode::Dict(pairs) = pickle.node(pickle.root()) else { panic!() };
        let keys: Vec<_> = pairs.iter().map(|(key, _)| pickle.text(*key).unwrap()).collect();
        assert_eq!(keys, ["b", "a"]);
        assert_eq!(pairs[0].1, pairs[1].1);
        let PickleNode::List(items) = pickle.node(pairs[1].1) else { panic!() };
        assert_eq!(pickle.node(items[0]), &PickleNode::Int(1));
    }

    #[test]
    fn objects_keep_class_arguments_and_attributes() {
        // cls.__new__(cls) with {"cur_scale": 8}; then an enumeration's member of the value 2.
        let pickle = parse(b"cdeepspeed\nLossScaler\n)\x81}U\x09cur_scaleK\x08sb.");
        let PickleNode::Object { attributes, class, .. } = pickle.node(pickle.root()) else {
            panic!()
        };
        assert!(matches!(pickle.node(*class), PickleNode::Class(..)));
        let PickleNode::Dict(pairs) = pickle.node(attributes.unwrap()) else { panic!() };
        assert_eq!(pickle.text(pairs[0].0), Some("cur_scale"));
        let pickle = parse(b"\x8c\x04zero\x8c\x05Stage\x93K\x02\x85R.");
        let PickleNode::Object { arguments, .. } = pickle.node(pickle.root()) else { panic!() };
        assert!(matches!(pickle.node(*arguments), PickleNode::List(list) if list.len() == 1));
    }

    #[test]
    fn tensors_know_their_storage() {
        let pickle = parse(&tensor(2, &[2, 2], &[2, 1]));
        let PickleNode::Tensor(tensor) = pickle.node(pickle.root()) else { panic!() };
        assert_eq!((tensor.offset, &tensor.shape[..], tensor.contiguous), (2, &[2, 2][..], true));
        let storages: Vec<_> = pickle.storages().collect();
        assert_eq!(storages, [("7", Some(FloatType::F32), 6)]);
    }

    #[test]
    fn strides_tell_whether_a_tensor_is_contiguous() {
        let contiguous = |shape: &[u8], strides: &[u8]| {
            let pickle = parse(&tensor(0, shape, strides));
            let PickleNode::Tensor(tensor) = pickle.node(pickle.root()) else { panic!() };
            tensor.contiguous
        };
        assert!(contiguous(&[], &[]));
        assert!(contiguous(&[2, 3], &[3, 1]));
        assert!(contiguous(&[1, 3], &[9, 1]));
        assert!(contiguous(&[0, 3], &[7, 7]));
        assert!(!contiguous(&[2, 3], &[1, 2]));
        assert!(!contiguous(&[6], &[0]));
    }

    #[test]
    fn tensors_do_not_exceed_their_storage() {
        assert!(error(&tensor(1, &[6], &[1])).contains("exceeds its storage"));
        assert!(error(&tensor(0, &[2], &[1, 1])).contains("strides"));
    }

    #[test]
    fn unknown_opcodes_and_broken_stacks_are_named() {
        assert_eq!(
            error(b"I5\n."),
            "unexpected pickle opcode `I` (0x49), which torch.save never writes, at byte 1"
        );
        assert_eq!(
            error(b"\xff."),
            "unexpected pickle opcode 0xff, which torch.save never writes, at byte 1"
        );
        assert_eq!(error(b"N"), "the pickle ends too early at byte 1");
        assert_eq!(error(b"X\xff\xff\xff\xff."), "the pickle ends too early at byte 5");
        assert_eq!(error(b"."), "a value is missing at byte 1");
        assert_eq!(error(b"("), "the pickle ends too early at byte 1");
        assert_eq!(error(b"h\x05."), "memo 5 is empty at byte 2");
        assert_eq!(error(b"u."), "a mark is missing at byte 1");
        assert_eq!(error(b"}(Nu."), "a dict has a key without a value at byte 4");
        assert_eq!(error(b"N)R."), "call of an object that is not a class at byte 3");
    }

    #[test]
    fn values_within_themselves_do_no_harm() {
        let pickle = parse(b"]q\x00h\x00a.");
        assert!(matches!(pickle.node(pickle.root()), PickleNode::List(items) if *items == [0]));
        // A tensor with attributes whose arguments are itself.
        let own = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00(h\x00N]q\x01Nl.";
        assert!(Pickle::parse(own).is_ok());
    }

    const OPCODES: &[u8] = b"(]})NK\x01\x85\x86\x87tlduesaRbQq0h1\x022cX\x89\x81\x92\x93\x94.";

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Pickle::parse(&bytes);
        }

        #[test]
        fn no_opcodes_make_it_panic(
            opcodes in proptest::collection::vec(
                proptest::sample::select(OPCODES.to_vec()),
                0..200,
            ),
        ) {
            let _ = Pickle::parse(&opcodes);
        }

        #[test]
        fn integers_of_any_length_are_read(value: i64, len in 1_usize..=8) {
            let bytes = value.to_le_bytes();
            let shift = 64 - 8 * len as u32;
            let mut pickle = vec![0x8a, len as u8];
            pickle.extend(&bytes[..len]);
            pickle.push(b'.');
            let parsed = parse(&pickle);
            prop_assert_eq!(parsed.node(0), &PickleNode::Int(value << shift >> shift));
        }
    }
}
