//! The decoder as a Burn module whose parameters have their public paths.
//!
//! [`Decoder`] forwards all methods of Burn's `Module` to its [`Stack`]. Visitors and mappers see
//! the public path of each parameter instead of its path in the stack.

use std::fmt;

use burn::module::{
    AutodiffModule, Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, Param,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Int, Tensor};

use super::model::{Decoder, Stack};
use crate::weights::Paths;

impl<B: Backend> Module<B> for Decoder<B> {
    type Record = <Stack<B> as Module<B>>::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.stack.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self { stack: self.stack.fork(device), ..self }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self { stack: self.stack.to_device(device), ..self }
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.stack.visit(&mut Renamed::new(visitor, &self.paths));
    }

    fn map<M: ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        let stack = self.stack.map(&mut Renamed::new(mapper, &self.paths));
        Self { stack, ..self }
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self { stack: self.stack.load_record(record), ..self }
    }

    fn into_record(self) -> Self::Record {
        self.stack.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Decoder<B> {
    type InnerModule = Decoder<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        let Self { stack, paths, config } = self;
        Decoder { stack: stack.valid(), paths: paths.clone(), config: config.clone() }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        let Decoder { stack, paths, config } = module;
        Self { stack: Stack::from_inner(stack), paths, config }
    }
}

impl<B: Backend> ModuleDisplayDefault for Decoder<B> {
    fn content(&self, content: Content) -> Option<Content> {
        self.stack.content(content)
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.stack)
    }
}

impl<B: Backend> ModuleDisplay for Decoder<B> {}

impl<B: Backend> fmt::Display for Decoder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(Default::default()))
    }
}

/// A visitor or mapper that sees public paths.
struct Renamed<'a, T> {
    inner: &'a mut T,
    paths: &'a Paths,
    /// The names and containers on the path in the module.
    entered: Vec<(String, String)>,
}

impl<'a, T> Renamed<'a, T> {
    fn new(inner: &'a mut T, paths: &'a Paths) -> Self {
        Self { inner, paths, entered: Vec::new() }
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.entered.push((name.to_owned(), container.to_owned()));
    }

    /// Returns the modules on the public path of the current parameter, each with the type of its
    /// container. The last container is the parameter's own, such as a linear layer.
    fn public(&self) -> Vec<(String, String)> {
        let own: Vec<&str> = self.entered.iter().map(|(name, _)| name.as_str()).collect();
        let own = own.join(".");
        let public = self.paths.get(&own).unwrap_or(&own);
        // A public path may have fewer or more parts than the path in the module. Only the
        // container of the parameter itself is known for all of them.
        let container = self.entered.last().map(|(_, container)| container.clone());
        let container = container.unwrap_or_default();
        public.split('.').map(|name| (name.to_owned(), container.clone())).collect()
    }
}

/// Calls a method of a visitor or mapper between entering and leaving the modules on the public
/// path.
macro_rules! at_public_path {
    ($self:ident, $method:ident($param:ident)) => {{
        let path = $self.public();
        // Public paths do not nest like the module's fields, so they are entered for each
        // parameter.
        path.iter().for_each(|(name, container)| $self.inner.enter_module(name, container));
        let result = $self.inner.$method($param);
        path.iter().rev().for_each(|(name, container)| $self.inner.exit_module(name, container));
        result
    }};
}

impl<B: Backend, V: ModuleVisitor<B>> ModuleVisitor<B> for Renamed<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.entered.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        at_public_path!(self, visit_float(param));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        at_public_path!(self, visit_int(param));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        at_public_path!(self, visit_bool(param));
    }
}

impl<B: Backend, M: ModuleMapper<B>> ModuleMapper<B> for Renamed<'_, M> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.entered.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        at_public_path!(self, map_float(param))
    }

    fn map_int<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Int>>,
    ) -> Param<Tensor<B, D, Int>> {
        at_public_path!(self, map_int(param))
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D, Bool>>,
    ) -> Param<Tensor<B, D, Bool>> {
        at_public_path!(self, map_bool(param))
    }
}
