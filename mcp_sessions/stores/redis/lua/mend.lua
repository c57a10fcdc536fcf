-- needs: session log keys
-- ARGV: now, 'all JSON' (every text that should be JSON is lost) or nothing
--
-- What another program left of a session: a key of another type, a value that is none of ours, a
-- key that is gone. Each part that cannot be read counts as lost, and the rest stays. Without its
-- main record the session is lost. How many parts were lost.
local lost, now, is_strict = 0, tonumber(ARGV[1]), ARGV[2] == 'all JSON'

local function kind(key)
    return redis.call('TYPE', key).ok
end

local function drop(key)
    redis.call('UNLINK', key)
    lost = lost + 1
end

local function drop_field(key, field)
    redis.call('HDEL', key, field)
    lost = lost + 1
end

-- Lua's JSON has numbers that nobody else's has.
local function is_json(text)
    local is_read, value = pcall(cjson.decode, text)
    return is_read and (pcall(cjson.encode, value))
end

local function is_kept(text)
    return not is_strict and is_json(text)
end

local function is_number(text)
    return text and (text == 'inf' or tonumber(text) and text ~= 'nan')
end

local function is_whole_number(text)
    return text and string.match(text, '^%-?%d+$') ~= nil
end

local MODES = { protocol = true, transport = true, agent = true, conversation = true, task = true }

local function is_session()
    local fields = redis.call('HMGET', base, 'id', 'mode', 'owner', 'maker', 'created', 'expires',
        'ends', 'fence', 'peer')
    local id, mode, owner, maker, created, expires, ends, fence, peer = unpack(fields)
    return id and mode and MODES[mode] and owner and is_json(owner) and maker and is_json(maker)
        and is_number(created) and is_number(expires) and is_number(ends)
        and is_whole_number(fence) and (not peer or is_json(peer))
end

-- --- the main record ------------------------------------------------------------------------

local found = kind(base)
if found ~= 'hash' or not is_session() then
    local gone = found == 'hash' and keys() or {
        base, base .. ':u', base .. ':s', base .. ':c', base .. ':d', base .. ':q', base .. ':qf',
        base .. ':qa', base .. ':r', base .. ':e:events', base .. ':k:events', base .. ':e:get',
        base .. ':k:get',
    }
    for first = 1, #gone, CHUNK do
        lost = lost + redis.call('UNLINK', unpack(gone, first, math.min(first + CHUNK - 1, #gone)))
    end
    return lost
end

for _, field in ipairs({ 'statev', 'datav', 'qb', 'qa', 'qn', 'ub' }) do
    local value = redis.call('HGET', base, field)
    if value and not is_whole_number(value) then
        drop_field(base, field)
    end
end
for _, field in ipairs({ 'current', 'lists' }) do
    local value = redis.call('HGET', base, field)
    if value and not is_kept(value) then
        drop_field(base, field)
    end
end
local covered = redis.call('HGET', base, 'covered')
if covered and not is_number(covered) then
    drop_field(base, 'covered')
end

-- --- what belongs to it ---------------------------------------------------------------------

local function is_of_type(suffix, wanted)
    local key = base .. suffix
    local there = kind(key)
    if there ~= 'none' and there ~= wanted then
        drop(key)
        there = 'none'
    end
    return there ~= 'none'
end

if not is_of_type(':u', 'hash') then
    redis.call('HDEL', base, 'uris', 'ub')
end
if is_of_type(':s', 'hash') then
    local state = redis.call('HGETALL', base .. ':s')
    for i = 1, #state, 2 do
        if not is_kept(state[i + 1]) then
            drop_field(base .. ':s', state[i])
        end
    end
end
if is_of_type(':c', 'hash') then
    local carried = redis.call('HGETALL', base .. ':c')
    for i = 1, #carried, 2 do
        if not string.match(carried[i + 1], '^%d+ %d+ %d+$') then
            drop_field(base .. ':c', carried[i])
        end
    end
end
if is_of_type(':d', 'string') and not is_kept(redis.call('GET', base .. ':d')) then
    drop(base .. ':d')
end
if not is_of_type(':r', 'zset') then
    redis.call('HDEL', base, 'listed')
end

for _, suffix in ipairs({ ':q', ':qf', ':qa' }) do
    is_of_type(suffix, suffix == ':q' and 'hash' or 'zset')
end
local all = open_keys('0', '0')
recount(all, now)
save_keys(all)
lost = lost + all.lost

-- --- its logs -------------------------------------------------------------------------------

local function is_log(stream, packed)
    if not read_log(stream, packed) then
        return false
    end
    for _, entry in ipairs(redis.call('XRANGE', base .. ':e:' .. stream, '-', '+')) do
        local members = members_of(entry)
        if not members.p or not tonumber(members.t or '') or not string.match(entry[1], '^%d+%-0$')
        then
            return false
        end
    end
    local by_key = redis.call('HGETALL', base .. ':k:' .. stream)
    for i = 1, #by_key, 2 do
        if not string.match(by_key[i + 1], '^%d+ %d+$') then
            return false
        end
    end
    return true
end

local fields = redis.call('HGETALL', base)
for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 2) == 'l:' then
        local stream = string.sub(fields[i], 3)
        is_of_type(':e:' .. stream, 'stream')
        is_of_type(':k:' .. stream, 'hash')
        if not is_log(stream, fields[i + 1]) then
            -- It begins anew when it is next used: positions in it are refused (CUP13).
            redis.call('HSET', base, fields[i], '?')
            redis.call('UNLINK', base .. ':e:' .. stream, base .. ':k:' .. stream)
            lost = lost + 1
        end
    end
end
return lost
