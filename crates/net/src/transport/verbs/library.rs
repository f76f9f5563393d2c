//! libibverbs, loaded at run time: the process starts without it, and its absence is an error only if RDMA is
//! requested.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::abi::*;
use super::error::VerbsError;

macro_rules! library {
    ($($field:ident: $symbol:literal $version:literal fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// Entry points of one loaded libibverbs. Loaded libraries stay for the life of the process.
        pub struct Library {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            /// Since rdma-core 32.
            pub(super) query_gid_ex: Option<QueryGidEx>,
        }

        impl Library {
            fn bind(handle: *mut c_void, library: &str) -> Result<Self, VerbsError> {
                Ok(Library {
                    $($field: {
                        let found = symbol(handle, $symbol, $version)
                            .ok_or_else(|| VerbsError::Symbol { library: library.to_owned(), symbol: $symbol })?;
                        // SAFETY: libibverbs documents this signature for the symbol and keeps it for this symbol
                        // version.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(found) }
                    },)*
                    query_gid_ex: symbol(handle, "_ibv_query_gid_ex", "IBVERBS_1.11").map(|found| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, QueryGidEx>(found) }
                    }),
                })
            }
        }
    };
}

type QueryGidEx = unsafe extern "C" fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;

library! {
    fork_init: "ibv_fork_init" "IBVERBS_1.1" fn() -> c_int;
    get_device_list: "ibv_get_device_list" "IBVERBS_1.1" fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list: "ibv_free_device_list" "IBVERBS_1.1" fn(*mut *mut ibv_device);
    get_device_name: "ibv_get_device_name" "IBVERBS_1.1" fn(*mut ibv_device) -> *const c_char;
    open_device: "ibv_open_device" "IBVERBS_1.1" fn(*mut ibv_device) -> *mut ibv_context;
    close_device: "ibv_close_device" "IBVERBS_1.1" fn(*mut ibv_context) -> c_int;
    query_device: "ibv_query_device" "IBVERBS_1.1" fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    query_port: "ibv_query_port" "IBVERBS_1.1" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_gid: "ibv_query_gid" "IBVERBS_1.1" fn(*mut ibv_context, u8, c_int, *mut GidField) -> c_int;
    get_async_event: "ibv_get_async_event" "IBVERBS_1.1" fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event: "ibv_ack_async_event" "IBVERBS_1.1" fn(*mut ibv_async_event);
    alloc_pd: "ibv_alloc_pd" "IBVERBS_1.1" fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd: "ibv_dealloc_pd" "IBVERBS_1.1" fn(*mut ibv_pd) -> c_int;
    reg_mr: "ibv_reg_mr" "IBVERBS_1.1" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr: "ibv_dereg_mr" "IBVERBS_1.1" fn(*mut ibv_mr) -> c_int;
    create_comp_channel: "ibv_create_comp_channel" "IBVERBS_1.0" fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel: "ibv_destroy_comp_channel" "IBVERBS_1.0" fn(*mut ibv_comp_channel) -> c_int;
    create_cq: "ibv_create_cq" "IBVERBS_1.1" fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq: "ibv_destroy_cq" "IBVERBS_1.1" fn(*mut ibv_cq) -> c_int;
    get_cq_event: "ibv_get_cq_event" "IBVERBS_1.1" fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events: "ibv_ack_cq_events" "IBVERBS_1.1" fn(*mut ibv_cq, c_uint);
    create_qp: "ibv_create_qp" "IBVERBS_1.1" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp: "ibv_modify_qp" "IBVERBS_1.1" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp: "ibv_destroy_qp" "IBVERBS_1.1" fn(*mut ibv_qp) -> c_int;
}

impl Library {
    /// Loads a library by name or path. Repeated calls for one name return the same library.
    pub fn load(name: &str) -> Result<&'static Library, VerbsError> {
        static LOADED: Mutex<Option<HashMap<String, &'static Library>>> = Mutex::new(None);
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(found) = loaded.get(name) {
            return Ok(found);
        }
        let failed = |reason: String| VerbsError::Library { library: name.to_owned(), reason };
        let path = CString::new(name).map_err(|_| failed("the name contains a zero byte".to_owned()))?;
        // SAFETY: `path` is zero-terminated; the library's constructors are libibverbs's own and safe to run.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(failed(last_error()));
        }
        let library: &'static Library = Box::leak(Box::new(Library::bind(handle, name)?));
        // Before any memory is registered: pinned pages must stay with this process when it forks. Kernels since 5.12
        // need no such call, and its failure has no other consequence.
        // SAFETY: no arguments; may be called at any time.
        unsafe { (library.fork_init)() };
        loaded.insert(name.to_owned(), library);
        Ok(library)
    }
}

fn symbol(handle: *mut c_void, name: &str, version: &str) -> Option<*mut c_void> {
    let (name, version) = (CString::new(name).ok()?, CString::new(version).ok()?);
    // SAFETY: an open handle and zero-terminated names.
    let versioned = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
    // A library built without symbol versions will do.
    let found = match versioned.is_null() {
        // SAFETY: as above.
        true => unsafe { libc::dlsym(handle, name.as_ptr()) },
        false => versioned,
    };
    (!found.is_null()).then_some(found)
}

fn last_error() -> String {
    // SAFETY: dlerror returns null or a zero-terminated text that lives until this thread's next dl… call.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_wrong_library_is_named() {
        let error = Library::load("/nonexistent/libibverbs.so.1").err().unwrap().to_string();
        assert!(error.contains("/nonexistent/libibverbs.so.1") && error.contains("install libibverbs"), "{error}");
        let error = Library::load("libc.so.6").err().unwrap().to_string();
        assert!(error.contains("libc.so.6 has no ibv_fork_init"), "{error}");
    }
}
