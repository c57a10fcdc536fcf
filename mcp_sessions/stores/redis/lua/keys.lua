-- Request keys: what core/request_keys.py decides, in the step that stores it. The same
-- tests run on both.
--
-- A key is a field of the hash :q (packed) and, once its request has finished, a member of
-- the sorted set :qf, in the order of finishing. Its kept answer is the field `a:<key>` of :q,
-- and then it is a member of :qa too. qb and qa of the session's hash count bytes: all, and
-- those of answers; qn counts what finished.

local entries, finished, answered

-- Those of the session that the script is at.
local function open_keys(max_bytes, lifetime)
    entries, finished, answered = base .. ':q', base .. ':qf', base .. ':qa'
    local counts = redis.call('HMGET', base, 'qb', 'qa', 'qn')
    return {
        bytes = tonumber(counts[1] or 0), answers = tonumber(counts[2] or 0),
        finished = tonumber(counts[3] or 0),
        max_bytes = tonumber(max_bytes), lifetime = tonumber(lifetime),
    }
end

local function save_keys(all)
    redis.call('HSET', base, 'qb', whole(all.bytes), 'qa', whole(all.answers),
        'qn', whole(all.finished))
end

-- An entry as it is stored; nil: it is none of ours.
local function unpacked(packed)
    local is_read, entry = pcall(cmsgpack.unpack, packed)
    if not is_read or type(entry) ~= 'table' then
        return nil
    end
    for _, name in ipairs({ 'at', 'cost', 'kept' }) do
        if type(entry[name]) ~= 'number' then
            return nil
        end
    end
    for _, name in ipairs({ 'digest', 'runner', 'scopes', 'state' }) do
        if type(entry[name]) ~= 'string' then
            return nil
        end
    end
    return entry
end

local function get_key(key)
    local packed = redis.call('HGET', entries, 'k:' .. key)
    return packed and unpacked(packed)
end

local function put_key(key, entry)
    redis.call('HSET', entries, 'k:' .. key, cmsgpack.pack(entry))
end

-- A part of the keys' records is gone, or is none of ours. What is left counts: a key that
-- finished is known, without its answer (KEY11); an answer without its key is nobody's; a key of
-- which nothing is left is a new one.
local OVERHEAD = 96
local function recount(all, now)
    local known, ends = {}, {}
    local stored = redis.call('HGETALL', entries)
    all.bytes, all.answers, all.finished, all.lost = 0, 0, 0, 0
    for i = 1, #stored, 2 do
        local key = string.match(stored[i], '^k:(.*)$')
        local entry = key and unpacked(stored[i + 1])
        if entry then
            known[key] = entry
        elseif key then
            redis.call('HDEL', entries, stored[i])
            all.lost = all.lost + 1
        end
    end
    local order = redis.call('ZRANGE', finished, 0, -1, 'WITHSCORES')
    for i = 1, #order, 2 do
        ends[order[i]] = tonumber(order[i + 1])
        all.finished = math.max(all.finished, ends[order[i]])
        if not known[order[i]] then
            known[order[i]] = {
                digest = '', runner = '', at = now, state = 'dropped', scopes = '[]', run = '',
                cost = #order[i] + OVERHEAD, kept = 0,
            }
            all.lost = all.lost + 1
        end
    end
    local unordered = {}
    redis.call('UNLINK', answered)
    for key, entry in pairs(known) do
        local answer = entry.state == 'answered' and redis.call('HGET', entries, 'a:' .. key)
        if entry.state == 'answered' and not answer then
            entry.state = 'dropped'
            all.lost = all.lost + 1
        end
        entry.kept = answer and #answer or 0
        all.bytes, all.answers = all.bytes + entry.cost + entry.kept, all.answers + entry.kept
        if entry.state ~= 'running' and not ends[key] then
            unordered[#unordered + 1] = key
        end
        put_key(key, entry)
    end
    table.sort(unordered, function(a, b) return known[a].at < known[b].at end)
    for _, key in ipairs(unordered) do
        all.finished, all.lost = all.finished + 1, all.lost + 1
        ends[key] = all.finished
        redis.call('ZADD', finished, ends[key], key)
    end
    for key, entry in pairs(known) do
        if entry.state == 'answered' then
            redis.call('ZADD', answered, ends[key], key)
        end
    end
    for i = 1, #stored, 2 do
        local key = string.match(stored[i], '^a:(.*)$')
        if key and not (known[key] and known[key].state == 'answered') then
            redis.call('HDEL', entries, stored[i])
        end
    end
    for _, each in ipairs({ entries, finished, answered }) do
        share_lifetime(each)
    end
end

local function expire_keys(all, now)
    while true do
        local key = redis.call('ZRANGE', finished, 0, 0)[1]
        if not key and all.finished > 0 then
            -- The counter begins anew where nothing finished is left, unless that was lost.
            recount(all, now)
            key = redis.call('ZRANGE', finished, 0, 0)[1]
        end
        if not key then
            return
        end
        local entry = get_key(key)
        if not entry then
            recount(all, now)
            entry = get_key(key)
        end
        if entry.at >= now - all.lifetime then
            return
        end
        redis.call('HDEL', entries, 'k:' .. key, 'a:' .. key)
        redis.call('ZREM', finished, key)
        redis.call('ZREM', answered, key)
        all.bytes = all.bytes - entry.cost - entry.kept
        all.answers = all.answers - entry.kept
    end
end

local function make_room(all, wanted, now)
    if all.bytes + wanted <= all.max_bytes then
        return true
    end
    -- What was lost takes no room.
    if redis.call('EXISTS', entries) == 0
        or redis.call('EXISTS', answered) == 0 and all.answers > 0 then
        recount(all, now)
    end
    if all.bytes - all.answers + wanted > all.max_bytes then
        -- It will not fit, whatever goes: then nothing has to go (KEY12, KEY13).
        return false
    end
    while all.bytes + wanted > all.max_bytes do
        local key = redis.call('ZRANGE', answered, 0, 0)[1]
        local entry = key and get_key(key)
        if not entry then
            recount(all, now)
            return all.bytes + wanted <= all.max_bytes
        end
        redis.call('HDEL', entries, 'a:' .. key)
        redis.call('ZREM', answered, key)
        all.bytes, all.answers = all.bytes - entry.kept, all.answers - entry.kept
        entry.state, entry.kept = 'dropped', 0
        put_key(key, entry)
    end
    return true
end

-- Whether those scopes (JSON) hold all of the others.
local function has_scopes(scopes, others)
    local known = {}
    for _, scope in ipairs(cjson.decode(scopes)) do
        known[scope] = true
    end
    for _, scope in ipairs(cjson.decode(others)) do
        if not known[scope] then
            return false
        end
    end
    return true
end

-- A known key never runs again (KEY3), and with other content is refused (KEY8).
-- What was found, and the entry and the answer if the key is known. A key that the run
-- instead_of recorded, which began nothing, is recorded anew.
local function begin_key(all, key, cost, digest, runner, scopes, now, run, instead_of)
    expire_keys(all, now)
    local known = get_key(key)
    local found = 'full'
    local answer = false
    if known then
        -- Of one whose record was lost the content is unknown.
        local is_same = known.digest == digest or known.digest == ''
        found = is_same and known.state or 'other_content'
        answer = found == 'answered' and redis.call('HGET', entries, 'a:' .. key)
        -- A caller without a scope of the first sending gets no answer, and begins nothing (SEC3).
        if found == 'running' and instead_of ~= '' and known.run == instead_of
            and has_scopes(scopes, known.scopes) then
            found = 'first'
            known.runner, known.run, known.at, known.scopes = runner, run, now, scopes
            put_key(key, known)
        end
    elseif make_room(all, cost, now) then
        found = 'first'
        known = {
            digest = digest, runner = runner, at = now, state = 'running', scopes = scopes,
            run = run, cost = cost, kept = 0,
        }
        put_key(key, known)
        share_lifetime(entries)
        all.bytes = all.bytes + cost
    end
    save_keys(all)
    return found, known, answer
end

-- Whether the answer was kept.
local function finish_key(all, key, has_answer, answer, now)
    expire_keys(all, now)
    local entry = get_key(key)
    local is_kept = false
    if entry and entry.state == 'running' then
        entry.at = now
        all.finished = all.finished + 1
        redis.call('ZADD', finished, all.finished, key)
        is_kept = has_answer and make_room(all, #answer, now)
        entry.state = is_kept and 'answered' or 'dropped'
        if is_kept then
            entry.kept = #answer
            all.bytes, all.answers = all.bytes + #answer, all.answers + #answer
            redis.call('HSET', entries, 'a:' .. key, answer)
            redis.call('ZADD', answered, all.finished, key)
            share_lifetime(answered)
        end
        put_key(key, entry)
        share_lifetime(finished)
    end
    save_keys(all)
    return is_kept
end
