//! libibverbs in memory: the part of its C interface that we use.
//!
//! Structures keep the library's names and field order; `unused` are fields that we do not need.
//! `crates/engine/tests/verbs/layout.rs` compares them with the C header where it is installed. The test suite's own
//! `libibverbs.so.1` shares this file.

#![allow(non_camel_case_types, reason = "the C names")]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// Opaque to us: only the library accesses them.
type Mutex = libc::pthread_mutex_t;
type Cond = libc::pthread_cond_t;

pub const QPT_RC: c_int = 2;

pub const QPS_INIT: c_int = 1;
pub const QPS_RTR: c_int = 2;
pub const QPS_RTS: c_int = 3;
pub const QPS_ERR: c_int = 6;

pub const QP_STATE: c_int = 1 << 0;
pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub const QP_PKEY_INDEX: c_int = 1 << 4;
pub const QP_PORT: c_int = 1 << 5;
pub const QP_AV: c_int = 1 << 7;
pub const QP_PATH_MTU: c_int = 1 << 8;
pub const QP_TIMEOUT: c_int = 1 << 9;
pub const QP_RETRY_CNT: c_int = 1 << 10;
pub const QP_RNR_RETRY: c_int = 1 << 11;
pub const QP_RQ_PSN: c_int = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub const QP_SQ_PSN: c_int = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub const QP_DEST_QPN: c_int = 1 << 20;

pub const ACCESS_LOCAL_WRITE: c_int = 1;
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;

pub const WR_SEND: c_int = 2;
pub const WR_RDMA_READ: c_int = 4;
pub const SEND_SIGNALED: c_uint = 1 << 1;

pub const WC_SUCCESS: c_int = 0;
pub const WC_LOC_LEN_ERR: c_int = 1;
pub const WC_LOC_PROT_ERR: c_int = 4;
pub const WC_WR_FLUSH_ERR: c_int = 5;
pub const WC_REM_INV_REQ_ERR: c_int = 9;
pub const WC_REM_ACCESS_ERR: c_int = 10;
pub const WC_REM_OP_ERR: c_int = 11;
pub const WC_RETRY_EXC_ERR: c_int = 12;
pub const WC_RNR_RETRY_EXC_ERR: c_int = 13;
pub const WC_FATAL_ERR: c_int = 19;

pub const WC_OPCODE_SEND: c_int = 0;
pub const WC_OPCODE_RDMA_READ: c_int = 2;
pub const WC_OPCODE_RECV: c_int = 1 << 7;

pub const PORT_ACTIVE: c_int = 4;
pub const PORT_ACTIVE_DEFER: c_int = 5;
pub const LINK_LAYER_INFINIBAND: u8 = 1;
pub const LINK_LAYER_ETHERNET: u8 = 2;

pub const EVENT_CQ_ERR: c_int = 0;
pub const EVENT_QP_FATAL: c_int = 1;
pub const EVENT_DEVICE_FATAL: c_int = 8;
pub const EVENT_PORT_ERR: c_int = 10;

pub const GID_TYPE_ROCE_V2: u32 = 2;

pub type Gid = [u8; 16];

#[repr(C)]
pub struct ibv_device {
    pub ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

pub type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// The provider's entry points. Four of them are called directly, as the C header's inline functions do.
#[repr(C)]
pub struct ibv_context_ops {
    pub unused1: [*mut c_void; 11],
    pub poll_cq: Option<PollCq>,
    pub req_notify_cq: Option<ReqNotifyCq>,
    pub unused2: [*mut c_void; 12],
    pub post_send: Option<PostSend>,
    pub post_recv: Option<PostRecv>,
    pub unused3: [*mut c_void; 5],
}

#[repr(C)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: Mutex,
    pub abi_compat: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device_attr {
    pub unused1: [u64; 13],
    pub unused2: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub unused3: [c_int; 4],
    pub max_cqe: c_int,
    pub unused4: [c_int; 2],
    pub max_qp_rd_atom: c_int,
    pub unused5: [c_int; 2],
    pub max_qp_init_rd_atom: c_int,
    pub unused6: [c_int; 16],
    pub unused7: [u8; 3],
    pub phys_port_cnt: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_port_attr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub unused1: u32,
    pub max_msg_sz: u32,
    pub unused2: [u32; 2],
    pub unused3: u16,
    pub lid: u16,
    pub unused4: [u8; 10],
    pub link_layer: u8,
    pub unused5: [u8; 3],
}

#[repr(C)]
pub struct ibv_gid_entry {
    pub gid: GidField,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[repr(C)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

#[repr(C)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: Mutex,
    pub cond: Cond,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut c_void,
    pub cap: ibv_qp_cap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

#[repr(C)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_int,
    pub qp_type: c_int,
    pub mutex: Mutex,
    pub cond: Cond,
    pub events_completed: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_global_route {
    pub dgid: GidField,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `union ibv_gid`: aligned like its 64-bit halves.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct GidField(pub Gid);

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_attr {
    pub qp_state: c_int,
    pub cur_qp_state: c_int,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// The source of a READ; as large as the largest member of the C union.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_target {
    pub remote_addr: u64,
    pub rkey: u32,
    pub unused: [u64; 2],
}

#[repr(C)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub rdma: rdma_target,
    pub xrc: u32,
    /// The unions for memory windows and segmentation offload.
    pub unused: [u64; 6],
}

#[repr(C)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
pub struct ibv_async_event {
    /// A pointer or a port number.
    pub element: u64,
    pub event_type: c_int,
}
