"""The control plane's pages."""

from django.urls import path

from controlplane.web.views import audit, fleet, people, policies, revisions, routers, task_groups, tokens

app_name = "controlplane"
urlpatterns = [
    path("policies/", policies.policy_list, name="policies"),
    path("policies/<int:policy_id>/", policies.policy_detail, name="policy"),
    path("policies/<int:policy_id>/edit/", policies.policy_edit, name="policy-edit"),
    path("policies/<int:policy_id>/check/", policies.policy_check, name="policy-check"),
    path("policies/<int:policy_id>/rollout/", policies.policy_rollout, name="policy-rollout"),
    path("policies/<int:policy_id>/publish/<int:revision_id>/", policies.policy_publish, name="policy-publish"),
    path("policies/<int:policy_id>/discard/", policies.policy_discard, name="policy-discard"),
    path("policies/<int:policy_id>/revisions/", revisions.revision_list, name="policy-revisions"),
    path("policies/<int:policy_id>/compare/", revisions.revision_compare, name="policy-compare"),
    path("policies/<int:policy_id>/revert/<int:number>/", revisions.policy_revert, name="policy-revert"),
    path("policies/<int:policy_id>/remove/", policies.policy_remove, name="policy-remove"),
    path("task-groups/<int:group_id>/policy/", policies.policy_create, name="policy-create"),
    path("fleet/", fleet.fleet, name="fleet"),
    path("fleet/pools/new/", fleet.pool_new, name="pool-new"),
    path("fleet/pools/<int:pool_id>/", fleet.pool_edit, name="pool"),
    path("fleet/pools/<int:pool_id>/remove/", fleet.pool_remove, name="pool-remove"),
    path("fleet/pools/<int:pool_id>/replicas/new/", fleet.replica_new, name="replica-new"),
    path("fleet/replicas/<int:replica_id>/", fleet.replica_edit, name="replica"),
    path("fleet/replicas/<int:replica_id>/state/<slug:state>/", fleet.replica_state, name="replica-state"),
    path("fleet/replicas/<int:replica_id>/remove/", fleet.replica_remove, name="replica-remove"),
    path("people/", people.people, name="people"),
    path("people/new/", people.person_new, name="person-new"),
    path("people/<int:person_id>/", people.person, name="person"),
    path("people/<int:person_id>/role/", people.person_role, name="person-role"),
    path("people/<int:person_id>/active/", people.person_active, name="person-active"),
    path("people/<int:person_id>/password/", people.person_password, name="person-password"),
    path("people/<int:person_id>/unlock/", people.person_unlock, name="person-unlock"),
    path("people/<int:person_id>/second-factor/", people.person_second_factor, name="person-second-factor"),
    path("projects/new/", people.project_new, name="project-new"),
    path("projects/<int:project_id>/remove/", people.project_remove, name="project-remove"),
    path("tokens/", tokens.tokens, name="tokens"),
    path("tokens/<int:token_id>/revoke/", tokens.token_revoke, name="token-revoke"),
    path("audit/", audit.audit, name="audit"),
    path("audit.csv", audit.audit_csv, name="audit-csv"),
    path("routers/", routers.router_list, name="routers"),
    path("task-groups/", task_groups.group_list, name="task-groups"),
    path("task-groups/new/<int:pool_id>/", task_groups.group_new, name="task-group-new"),
    path("task-groups/<int:group_id>/", task_groups.group_edit, name="task-group"),
    path("task-groups/<int:group_id>/remove/", task_groups.group_remove, name="task-group-remove"),
]
