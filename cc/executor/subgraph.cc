#include "cc/executor/subgraph.h"

#include "cc/executor/subgraph_table.h"

namespace starwire {

Status Subgraph::Compile(const tensorflow::LocalExecutorParams& params, const tensorflow::Graph& graph, int threads,
                         std::unique_ptr<Subgraph>* out, std::string* unsupported) {
  unsupported->clear();
  auto* table = new SubgraphTable(params);
  std::unique_ptr<Subgraph> subgraph(new Subgraph(table));
  Status status = table->Compile(graph, threads, unsupported);
  if (status.ok() && unsupported->empty()) *out = std::move(subgraph);
  return status;
}

Subgraph::~Subgraph() {
  table_->Retire();
  table_->Unref();
}

size_t Subgraph::num_feeds() const { return table_->arg_slots.size(); }

size_t Subgraph::num_fetches() const { return table_->num_fetches; }

bool Subgraph::is_async() const { return table_->num_asyncs != 0; }

uint64_t Subgraph::CostNanos() const { return sw_exec_cost_ns(table_->plan.get()); }

}  // namespace starwire
