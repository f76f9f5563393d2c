"""Writes headers of TensorFlow 1.15.5 with what DeepRec changed in the classes that starwire uses.

usage: emulate.py OUTPUT INCLUDE…   (INCLUDE: where the headers are now, the first hit counts)

Each change is described by hand, from DeepRec's public headers; nothing of them is copied. A header that does not look as expected is an error.
"""

import re
import sys
from pathlib import Path

CORE = "tensorflow/core/"
RUNTIME = CORE + "distributed_runtime/"

# header: [(where, what)]: the text goes behind the match of the expression, or takes the place of its group "old".
CHANGES = {
    RUNTIME + "worker_interface.h": [
        (
            r"virtual void GetStatusAsync\([^;]*= 0;",
            "virtual void GetStatusAsyncWithOptions(const GetStatusRequest*, GetStatusResponse*, StatusCallback, CallOptions*) = 0;",
        ),
    ],
    RUNTIME + "worker.h": [
        (
            r"void GetStatusAsync\([^;]*override;",
            "void GetStatusAsyncWithOptions(const GetStatusRequest*, GetStatusResponse*, StatusCallback, CallOptions*) override;",
        ),
    ],
    CORE + "framework/rendezvous.h": [
        (r"friend class RecvOp;", "friend class FuseRecvOp; friend class SliceRecvOp; friend class RefRecvOp;"),
        (
            r"virtual Status Send\([^;]*= 0;",
            """virtual Status Send(const ParsedKey&, const Args&, Tensor*, mutex*, const bool) { return Status::OK(); }
            virtual Status FlowControlSend(const StringPiece&, const ParsedKey&, const Args&, const Tensor&, const bool, const int64) { return Status::OK(); }""",
        ),
        (
            r"virtual void RecvAsync\([^;]*= 0;",
            """typedef std::function<void(const Status&, const Args&, const Args&, Tensor*, mutex*, const bool)> RefDoneCallback;
            typedef std::function<void(const Status&, const std::vector<Args>&, const Args&, const std::vector<Tensor>&, const std::vector<bool>&)> FuseDoneCallback;
            virtual void RecvAsync(const ParsedKey&, const Args&, RefDoneCallback) {}
            virtual void FuseRecvAsync(const std::vector<ParsedKey>&, const Args&, FuseDoneCallback) {}
            virtual void FlowControlRecvAsync(const StringPiece&, const ParsedKey&, const Args&, DoneCallback) {}""",
        ),
    ],
    RUNTIME + "rendezvous_mgr_interface.h": [
        (r"virtual Status Initialize\([^;]*= 0;", "virtual int64 GetAllFlowControlItemNum() = 0; virtual int64 GetFlowControlItemNum(StringPiece) = 0;"),
        (
            r"virtual Status RecvLocal\([^;]*= 0;",
            """virtual void FuseRecvLocalAsync(int64, const std::vector<Rendezvous::ParsedKey>&, Rendezvous::FuseDoneCallback) = 0;
            virtual void FlowControlRecvLocalAsync(int64, const StringPiece&, const Rendezvous::ParsedKey&, Rendezvous::DoneCallback) = 0;
            virtual RemoteRendezvous* FindInterStepRendezvous() = 0;""",
        ),
    ],
    RUNTIME + "base_rendezvous_mgr.h": [
        (
            r"Status RecvLocal\([^;]*override;",
            """void FuseRecvLocalAsync(int64, const std::vector<Rendezvous::ParsedKey>&, Rendezvous::FuseDoneCallback) override;
            void FlowControlRecvLocalAsync(int64, const StringPiece&, const Rendezvous::ParsedKey&, Rendezvous::DoneCallback) override;
            RemoteRendezvous* FindInterStepRendezvous() override;""",
        ),
        (
            r"Status Send\([^;]*override;",
            """Status Send(const ParsedKey&, const Rendezvous::Args&, Tensor*, mutex*, const bool) override;
            Status FlowControlSend(const StringPiece&, const ParsedKey&, const Args&, const Tensor&, const bool, const int64) override;
            void RecvAsync(const ParsedKey&, const Rendezvous::Args&, RefDoneCallback) override;
            void FuseRecvAsync(const std::vector<ParsedKey>&, const Rendezvous::Args&, FuseDoneCallback) override;
            void FlowControlRecvAsync(const StringPiece&, const ParsedKey&, const Args&, DoneCallback) override;
            int64 GetAllFlowControlItemNum() override;
            int64 GetFlowControlItemNum(StringPiece) override;""",
        ),
        (
            r"virtual void RecvFromRemoteAsync\([^;]*= 0;",
            """virtual void FuseRecvFromRemoteAsync(const std::vector<Rendezvous::ParsedKey>&, const Rendezvous::Args&, FuseDoneCallback);
            virtual void FlowControlRecvFromRemoteAsync(const StringPiece&, const Rendezvous::ParsedKey&, const Rendezvous::Args&, DoneCallback);""",
        ),
    ],
    CORE + "common_runtime/executor.h": [
        (r"struct Args \{\s*(?P<old>int64 step_id = 0;)", "int64_t step_id = 0; int64_t round_step_id = 0; Rendezvous* global_rendezvous = nullptr;"),
        (
            r"struct Args \{[^}]*Runner runner = nullptr;",
            """typedef std::function<void(Closure, int64)> CostRunner;
            CostRunner cost_runner = nullptr;
            int64_t start_time_usecs = 0;
            absl::optional<uint64> deadline;
            std::unique_ptr<mutex> ref_send_inputs_mu_ptr;
            std::vector<TensorReference*>* ref_send_inputs_ptr = nullptr;""",
        ),
        (r"struct LocalExecutorParams \{", "bool run_cost_model_executor = false;"),
    ],
    CORE + "framework/op_kernel.h": [
        (
            r"(?P<old>const gtl::InlinedVector<DeviceContext\*, 4>\* input_device_contexts =\s*nullptr;)",
            """int64 round_step_id = 0; int64 start_time_usecs = 0; absl::optional<uint64> deadline;
            Rendezvous* global_rendezvous = nullptr;
            const gtl::InlinedVector<bool, 4>* is_input_dead_details = nullptr;
            bool run_all_kernels_inline = false; bool* outputs_required_array = nullptr;""",
        ),
        (r"int64 step_id\(\) const \{[^}]*\}", "int64 round_step_id() const { return params_->round_step_id; } Rendezvous* global_rendezvous() const { return params_->global_rendezvous; }"),
        (r"(?P<old>template <typename T>\s*T\* input_device_context\(int index\);\s*DeviceContext\* input_device_context\(int index\);)", ""),
        (r"(?P<old>template <typename T>\s*T\* OpKernelContext::input_device_context\(.*?\n\})", ""),
        (r"(?P<old>inline DeviceContext\* OpKernelContext::input_device_context\(.*?\n\})", ""),
    ],
    RUNTIME + "master_env.h": [
        (r"struct MasterEnv \{", "bool tensor_fuse = false; thread::ThreadPool* compute_pool = nullptr; bool run_graph_mode = false;"),
    ],
    RUNTIME + "rpc/grpc_server_lib.h": [
        (r"worker_impl_\.get\(\); \}\s*(?P<old>private:\s*// The overall server configuration\.\s*const ServerDef server_def_;)", "protected: ServerDef server_def_; GrpcServerOptions opts_;"),
    ],
    RUNTIME + "rpc/grpc_worker_service_impl.h": [
        (r"kRecvTensor,", "kFuseRecvTensor, kFlowControlRecvTensor,"),
    ],
    CORE + "protobuf/config.pb.h": [
        (r"class ConfigProto :[^{]*\{\s*public:", "bool tensor_fuse() const { return false; }"),
    ],
}


def changed(header, text):
    for where, what in CHANGES[header]:
        match = re.search(where, text, re.DOTALL)
        if not match:
            sys.exit(f"{header} is not as in TensorFlow 1.15.5: it lacks {where}")
        start, end = match.span("old") if "old" in match.groupdict() else (match.end(), match.end())
        text = f"{text[:start]}\n{what}\n{text[end:]}"
    return text


def main(output, *folders):
    for header in CHANGES:
        source = next((path for folder in folders if (path := Path(folder, header)).exists()), None)
        if source is None:
            sys.exit(f"no header {header} in {', '.join(folders)}")
        path = Path(output, header)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed(header, source.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
