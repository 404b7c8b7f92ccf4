//! Runs the stages of a model: graphs as plans of a backend, with values on its device.

use crate::backend::Backend;
use crate::executable::{Executable, Lease, OutputMemory, submit};
use crate::planner::Wanted;
use halcyon_formats::onnx::{Engine, Handle};
use halcyon_hal::{BufferRef, Command, Tag};
use halcyon_host as host;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::plan::PlanOutput;
use halcyon_ir::{ConstData, DType, Graph, Scalar};
use std::sync::{Arc, Mutex};

/// Number of conditions read between two checks of the device for faults.
const FAULTS: u32 = 64;

/// Maximum number of results of earlier runs that a plan keeps per output for reuse. (A loop's state
/// alternates between two buffers.)
const RESULTS: usize = 4;

/// A tensor on the device. Its buffer may be larger than its value.
#[derive(Debug)]
struct DeviceTensor {
    buffer: BufferRef,
    dtype: DType,
    dims: Vec<usize>,
}

impl DeviceTensor {
    fn bytes(&self) -> usize {
        self.dtype.bytes(self.dims.iter().product())
    }
}

#[derive(Debug)]
pub(super) struct DeviceEngine {
    backend: Backend,
    flags: u32,
}

/// A plan that is run many times, with its own bindings.
#[derive(Debug)]
struct PreparedGraph {
    exe: Arc<Executable>,
    bound: Mutex<Bound>,
}

#[derive(Debug)]
struct Bound {
    lease: Option<Lease>,
    /// Results of earlier runs, per output. A result that nothing else holds is overwritten by a later run.
    results: Vec<Vec<Handle>>,
}

impl Drop for PreparedGraph {
    fn drop(&mut self) {
        let bound = self.bound.get_mut().unwrap_or_else(|e| e.into_inner());
        if let Some(l) = bound.lease.take() {
            self.exe.give_back(l);
        }
    }
}

fn device(h: &Handle) -> Result<&DeviceTensor> {
    h.downcast_ref().ok_or_else(|| Error::internal("a tensor of another engine"))
}

fn given(v: &Option<Handle>) -> Result<&Handle> {
    v.as_ref().ok_or_else(|| Error::internal("an input of a plan has no value"))
}

fn tensor(buffer: BufferRef, o: &PlanOutput) -> Handle {
    Arc::new(DeviceTensor { buffer, dtype: o.dtype, dims: o.dims.to_vec() })
}

impl DeviceEngine {
    pub(super) fn new(backend: &Backend) -> DeviceEngine {
        DeviceEngine { backend: backend.clone(), flags: 0 }
    }

    fn copy(&self, src: &BufferRef, dst: &BufferRef, dst_offset: usize, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let copy = Command::Copy { src, src_offset: 0, dst, dst_offset, bytes };
        let r = self.backend.runtime();
        submit(&*r.device, r.queues.current().as_deref(), &[copy])
    }
}

impl Engine for DeviceEngine {
    fn run(&mut self, graph: Graph, inputs: &[Handle]) -> Result<Vec<Handle>> {
        let buffers = inputs.iter().map(|h| Ok(device(h)?.buffer.clone())).collect::<Result<Vec<_>>>()?;
        let wanted = Wanted { sample: Some((&buffers, &[])), mixed: None };
        let exe = self.backend.planner().plan_for(graph, vec![], wanted)?;
        let out = exe.run(&buffers, &[])?;
        Ok(out.into_iter().zip(&exe.plan().outputs).map(|(b, o)| tensor(b, o)).collect())
    }

    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        let d = self.backend.device();
        let buffer = d.alloc(data.bytes().len(), Tag::Io)?;
        d.write(&buffer, 0, data.bytes())?;
        Ok(Arc::new(DeviceTensor { buffer, dtype: data.dtype, dims: data.dims.to_vec() }))
    }

    fn read(&mut self, tensor: &Handle) -> Result<ConstData> {
        let t = device(tensor)?;
        let mut bytes = host::zeros(t.bytes(), "a value of the model")?;
        self.backend.device().read(&t.buffer, 0, &mut bytes)?;
        self.backend.check_faults()?;
        ConstData::new(t.dtype, &t.dims, Arc::new(bytes))
    }

    fn prepare(&mut self, graph: Graph) -> Result<Handle> {
        let exe = self.backend.plan(graph, vec![])?;
        let lease = Some(exe.lease(self.backend.runtime().queues.current().as_deref())?);
        let results = vec![vec![]; exe.plan().outputs.len()];
        Ok(Arc::new(PreparedGraph { exe, bound: Mutex::new(Bound { lease, results }) }))
    }

    fn launch(
        &mut self,
        plan: &Handle,
        values: &mut [Option<Handle>],
        inputs: &[usize],
        outputs: &[usize],
    ) -> Result<()> {
        let plan: &PreparedGraph =
            plan.downcast_ref().ok_or_else(|| Error::internal("a plan of another engine"))?;
        let exe = &plan.exe;
        let mut bound = plan.bound.lock().unwrap_or_else(|e| e.into_inner());
        let Bound { lease: Some(lease), results } = &mut *bound else {
            return Err(Error::internal("a plan without bindings"));
        };
        for (k, i) in inputs.iter().enumerate() {
            exe.bind_input(lease, k, &device(given(&values[*i])?)?.buffer)?;
        }
        for (k, o) in outputs.iter().enumerate() {
            values[*o] = None;
            let free = results[k].iter().find(|h| Arc::strong_count(h) == 1).cloned();
            let h = match free {
                Some(h) => h,
                None => {
                    let OutputMemory::Own(b) = exe.output_memory(k)? else {
                        return Err(Error::internal("an input of a loop's body was donated"));
                    };
                    let h = tensor(b, &exe.plan().outputs[k]);
                    // Something else still holds every kept result. The oldest one makes room.
                    if results[k].len() == RESULTS {
                        results[k].remove(0);
                    }
                    results[k].push(h.clone());
                    h
                }
            };
            exe.bind_output(lease, k, &device(&h)?.buffer);
            values[*o] = Some(h);
        }
        exe.submit(lease, &[], self.backend.runtime().queues.current().as_deref())?;
        Ok(())
    }

    fn flag(&mut self, tensor: &Handle) -> Result<bool> {
        let t = device(tensor)?;
        let mut bytes = [0u8; 8];
        self.backend.device().read(&t.buffer, 0, &mut bytes[..t.dtype.size()])?;
        self.flags = self.flags.wrapping_add(1);
        if self.flags.is_multiple_of(FAULTS) {
            self.backend.check_faults()?;
        }
        Ok(Scalar::from_bytes(t.dtype, &bytes).as_bool())
    }

    fn resize(&mut self, from: Option<&Handle>, dtype: DType, dims: &[usize]) -> Result<Handle> {
        let t = DeviceTensor {
            buffer: self.backend.device().alloc(dtype.bytes(dims.iter().product()), Tag::Io)?,
            dtype,
            dims: dims.to_vec(),
        };
        if let Some(h) = from {
            let old = device(h)?;
            self.copy(&old.buffer, &t.buffer, 0, old.bytes().min(t.bytes()))?;
        }
        Ok(Arc::new(t))
    }

    fn put(&mut self, into: &mut Handle, at: usize, tensor: &Handle) -> Result<()> {
        let (to, row) = (device(into)?, device(tensor)?);
        self.copy(&row.buffer, &to.buffer, at, row.bytes())
    }
}
