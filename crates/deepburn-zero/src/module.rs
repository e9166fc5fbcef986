//! Burn's modules: the types of this crate's visitors and mappers, and the path of a position.
//!
//! All code that walks over a module imports Burn from here, so that this file shows what the crate
//! needs of Burn above the backend. Main type: [`ModulePath`].

pub(crate) use burn::module::{
    AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId, ParamMapper,
};
pub(crate) use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};

/// The path of a parameter in a module.
#[derive(Debug, Default)]
pub(crate) struct ModulePath {
    /// The field names and the types of their containers.
    names: Vec<(String, String)>,
}

impl ModulePath {
    /// Enters the field `name` of a container. `container` is Burn's name of its type.
    pub(crate) fn enter(&mut self, name: &str, container: &str) {
        self.names.push((name.to_owned(), container.to_owned()));
    }

    /// Leaves the field that was entered last.
    pub(crate) fn exit(&mut self) {
        self.names.pop();
    }

    /// Returns the names, joined by dots.
    pub(crate) fn joined(&self) -> String {
        let names: Vec<_> = self.names.iter().map(|(name, _)| name.as_str()).collect();
        names.join(".")
    }

    /// Returns the type name of the layer that contains the parameter; empty if there is none.
    pub(crate) fn layer(&self) -> &str {
        // Burn passes `Struct:Embedding` for a field of its embedding.
        let container =
            self.names.last().and_then(|(_, container)| container.strip_prefix("Struct:"));
        container.unwrap_or_default()
    }
}

/// Expands to the methods of a visitor or mapper that keep its field `path`, a [`ModulePath`].
macro_rules! keep_path {
    () => {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.path.enter(name, container);
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.exit();
        }
    };
}
pub(crate) use keep_path;
