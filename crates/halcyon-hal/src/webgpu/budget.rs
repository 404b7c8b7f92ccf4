//! Total and free memory of an adapter. WebGPU cannot query this, but two of the APIs under it can: Vulkan by
//! VK_EXT_memory_budget, and DXGI by QueryVideoMemoryInfo. Both report a budget for this process that takes
//! the memory of other processes into account. Metal has no such query.

/// An adapter's own memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Memory {
    pub total: Option<u64>,
    pub free: Option<u64>,
}

/// The current values, queried from the API under WebGPU.
pub(super) fn of(adapter: &wgpu::Adapter) -> Memory {
    #[cfg(not(target_vendor = "apple"))]
    if let Some(m) = vulkan(adapter) {
        return m;
    }
    #[cfg(windows)]
    if let Some(m) = dxgi(adapter) {
        return m;
    }
    let _ = adapter;
    Memory::default()
}

/// Uses the largest device-local heap, because a host-visible part of the same memory may be listed as
/// another heap.
#[cfg(not(target_vendor = "apple"))]
fn vulkan(adapter: &wgpu::Adapter) -> Option<Memory> {
    use ash::vk;
    // SAFETY: the queries below neither change nor destroy objects that wgpu owns.
    let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let (instance, device) = (hal.shared_instance(), hal.raw_physical_device());
    let raw = instance.raw_instance();
    // SAFETY: the physical device belongs to the instance, and `hal` keeps both alive.
    let (properties, plain, extensions) = unsafe {
        let extensions = raw.enumerate_device_extension_properties(device).unwrap_or_default();
        (
            raw.get_physical_device_properties(device),
            raw.get_physical_device_memory_properties(device),
            extensions,
        )
    };
    let on_device = |i: &usize| plain.memory_heaps[*i].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let heap = (0..plain.memory_heap_count as usize)
        .filter(on_device)
        .max_by_key(|i| plain.memory_heaps[*i].size)?;
    let total = plain.memory_heaps[heap].size;
    // The extensible query requires Vulkan 1.1.
    let asks = instance.instance_api_version().min(properties.api_version) >= vk::API_VERSION_1_1;
    let told = extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(ash::ext::memory_budget::NAME));
    let free = (asks && told).then(|| {
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut all = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the physical device belongs to the instance, and `hal` keeps both alive. The device
        // supports the extension of the chained structure, and both structures outlive the call.
        unsafe { raw.get_physical_device_memory_properties2(device, &mut all) };
        budget.heap_budget[heap].saturating_sub(budget.heap_usage[heap])
    });
    Some(Memory { total: Some(total), free: free.map(|f| f.min(total)) })
}

/// The device-local memory (segment group "local", the default).
#[cfg(windows)]
fn dxgi(adapter: &wgpu::Adapter) -> Option<Memory> {
    // SAFETY: the query below neither changes nor destroys objects that wgpu owns.
    let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Dx12>() }?;
    let info = hal.raw_adapter().query_video_memory_info(Default::default()).ok()?;
    Some(Memory { total: None, free: Some(info.Budget.saturating_sub(info.CurrentUsage)) })
}
