-- The bytes of a session's subscriptions are counted in ub of its hash, so that a new one does not
-- read all of them. An older version does not count: what seems too much is added up again.

local function added_up(uris)
    local total = 0
    for _, uri in ipairs(redis.call('HKEYS', uris)) do
        total = total + #uri
    end
    return total
end

-- The bytes with `more`, as text; nil: they are more than `most`.
local function uri_bytes(uris, more, most)
    local counted = redis.call('HGET', base, 'ub')
    local total = (counted and tonumber(counted) or added_up(uris)) + more
    if counted and total > most then
        total = added_up(uris) + more
    end
    return total <= most and whole(total) or nil
end
