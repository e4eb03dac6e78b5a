"""A planner on the device, the plan that it makes, and the workspace of the runs by that plan."""

import torch

import headwater.cuda

#: vLLM's block 0 stands for "no block".
_NULL_BLOCK = 0


class DevicePlans:
    """Allocates once: device memory of fixed addresses, which graphs may capture."""

    def __init__(self, shape, options, *, max_requests, max_rows, max_blocks, page_size, num_pages, device):
        self.planner = headwater.cuda.DevicePlanner(
            shape,
            options,
            max_requests=max_requests,
            max_rows=max_rows,
            max_blocks=max_blocks,
            page_size=page_size,
            num_pages=num_pages,
            null_page=_NULL_BLOCK,
            device=device,
        )
        self.plan = headwater.cuda.DevicePlan(shape, self.planner.capacity, device=device)
        self.max_requests = max_requests
        self.num_pages = num_pages
        self._device = device
        self.workspace = None

    def share_workspace(self, workspace):
        """Takes `workspace` if it is large enough, or a new one; returns it. Plans of one stream may share."""
        size = self.plan.workspace_size()
        if workspace is None or workspace.numel() < size:
            workspace = torch.empty(max(size, 64), dtype=torch.uint8, device=self._device)
        self.workspace = workspace
        return workspace
